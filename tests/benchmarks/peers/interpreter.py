"""The Python that a peer runs with: this one, or one of its own where it needs a newer one than this checkout.

Its environment is made when it is first asked for, in the data folder, from the locked requirements of the benchmarks.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from django.conf import settings

#: Peers that need a newer Python than the oldest one of this checkout.
NEWER = {"dj_queue": (3, 12)}
_NEWEST = (3, 13)
_REQUIREMENTS = Path(__file__).resolve().parents[3] / "requirements-bench.txt"


class NoInterpreter(Exception):
    """No Python that suits is on this machine."""


def interpreter_of(peer: str) -> str:
    """The path of the Python that runs a peer. Raises NoInterpreter."""
    needed = NEWER.get(peer, sys.version_info[:2])
    if sys.version_info[:2] >= needed:
        return sys.executable
    environment = Path(settings.DATA_DIR, "bench-python")
    python, installed = environment / "bin" / "python", environment / "installed.txt"
    wanted = _REQUIREMENTS.read_text()
    if installed.exists() and installed.read_text() == wanted:
        return str(python)
    found = next(_found(needed), None)
    if found is None:
        versions = " or ".join(f"{major}.{minor}" for major, minor in sorted({needed, _NEWEST}))
        raise NoInterpreter(f"{peer} needs Python {versions}, and none was found on this machine")
    uv = [sys.executable, "-m", "uv"]
    subprocess.run([*uv, "venv", "--quiet", "--clear", "--python", found, str(environment)], check=True)
    install = ["pip", "install", "--quiet", "--require-hashes", "--python", str(python), "-r", str(_REQUIREMENTS)]
    subprocess.run([*uv, *install], check=True)
    installed.write_text(wanted)
    return str(python)


def _found(needed: tuple[int, int]) -> Iterator[str]:
    """Interpreters that start, the newest first; a version manager's launcher may have nothing behind it."""
    versions_of_pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv", "versions")
    for minor in range(_NEWEST[1], needed[1] - 1, -1):
        name = f"python3.{minor}"
        candidates = [shutil.which(name), f"/usr/bin/{name}"]
        candidates += sorted(str(path) for path in versions_of_pyenv.glob(f"3.{minor}.*/bin/python"))
        for candidate in filter(None, candidates):
            try:
                output = subprocess.run([candidate, "--version"], capture_output=True, text=True, check=True).stdout
            except (OSError, subprocess.CalledProcessError):
                continue
            if output.startswith(f"Python 3.{minor}."):
                yield candidate
