"""Finds the Chromium that the browser tests drive.

`python -m tests.chromium` installs Debian's where there is none and it is allowed to. It always succeeds: without a
browser, those tests are skipped by name.
"""

import shutil
import sys
from pathlib import Path

from project.system_packages import install_first_available

_PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find_chromium() -> Path | None:
    """The path of a Chromium or Chrome on PATH, or None."""
    for name in _PROGRAMS:
        program = shutil.which(name)
        if program:
            return Path(program)
    return None


def main() -> int:
    if find_chromium() is not None:
        return 0
    print("The browser tests need Chromium, and there is none; trying to install it ...", flush=True)
    if install_first_available(["chromium"]) is None or find_chromium() is None:
        print(
            "It could not be installed (sudo apt-get install chromium); the browser tests are skipped.", file=sys.stderr
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
