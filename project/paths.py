"""Where this checkout is, and where it keeps what it makes."""

import os
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent


def data_directory() -> Path:
    """The git-ignored folder of the embedded database and the development key: DATA_DIR, or `.data` in the checkout."""
    return Path(os.environ.get("DATA_DIR") or CHECKOUT / ".data").resolve()
