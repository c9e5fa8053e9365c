"""Finds the system libraries that the drivers of SQL Server need: its T-SQL is written and its errors are made by them.

`python -m tests.odbc` installs the distribution's where some are missing and it is allowed to. It always succeeds:
without them, the tests of SQL Server's client are skipped by name.
"""

from __future__ import annotations

import ctypes
import sys

import pytest

from project.system_packages import install_first_available

#: Library -> the package that has it, under the names it goes by.
_LIBRARIES = {
    "libodbc.so.2": ("libodbc2", "libodbc1"),
    "libltdl.so.7": ("libltdl7",),
    "libgssapi_krb5.so.2": ("libgssapi-krb5-2",),
}


def missing() -> list[str]:
    """The libraries that cannot be loaded."""
    return [name for name in _LIBRARIES if not _loads(name)]


def _loads(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def required() -> None:
    """Skip the test that calls this where a library is missing."""
    absent = missing()
    if absent:
        pytest.skip(f"the drivers of SQL Server need {', '.join(absent)}")


def main() -> int:
    absent = missing()
    if not absent:
        return 0
    print(f"The tests of SQL Server's client need {', '.join(absent)}; trying to install ...", flush=True)
    for name in absent:
        install_first_available(_LIBRARIES[name])
    if missing():
        packages = " ".join(_LIBRARIES[name][0] for name in missing())
        print(f"It could not be done (sudo apt-get install {packages}); those tests are skipped.", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
