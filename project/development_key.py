"""The SECRET_KEY of a development checkout: random, made once, readable by its owner only.

A key in the repository would be everybody's; a new one at each start would log the developer out.
"""

import os
import secrets
from pathlib import Path


def development_key(data_directory: Path) -> str:
    """The key kept in `data_directory`, made there at the first call; a throw-away key where nothing can be written."""
    path = data_directory / "secret_key"
    try:
        data_directory.mkdir(parents=True, exist_ok=True)
        # The file gets its name only when it is complete: a process that starts at the same moment reads all or none.
        fresh = path.with_name(f"secret_key.{os.getpid()}.{secrets.token_hex(4)}")
        if not path.exists():
            fresh.touch(mode=0o600)
            fresh.write_text(secrets.token_urlsafe(50))
            try:
                os.link(fresh, path)
            except FileExistsError:
                pass
            finally:
                fresh.unlink()
        return path.read_text()
    except OSError:
        return secrets.token_urlsafe(50)
