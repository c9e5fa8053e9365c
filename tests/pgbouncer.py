"""Finds the PgBouncer that the crash suite puts between its processes and their server.

`python -m tests.pgbouncer` installs Debian's where there is none and it is allowed to (where systemd runs, the package
also starts a service on port 6432, which no test uses). It always succeeds: without one, those tests are skipped by
name.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

from project.system_packages import install_first_available


def find_pgbouncer() -> str | None:
    """The path of PgBouncer, or None. Debian puts it where only root looks."""
    return shutil.which("pgbouncer", path=os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin"]))


def version(program: str) -> tuple[int, int]:
    """Its version. ``max_prepared_statements`` works for psycopg from (1, 22) on; it is 0 unless set, 200 from (1, 24)
    on."""
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"PgBouncer (\d+)\.(\d+)", said)
    assert found is not None, said
    return int(found[1]), int(found[2])


def main() -> int:
    if find_pgbouncer() is not None:
        return 0
    print("The tests of connection poolers need PgBouncer, and there is none; trying to install it ...", flush=True)
    if install_first_available(["pgbouncer"]) is None or find_pgbouncer() is None:
        print("It could not be installed (sudo apt-get install pgbouncer); those tests are skipped.", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
