"""The tables of a scene: those of the project, by `migrate`, and those of the ledger."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from ..workload import ledger
from .processes import CHECKOUT, environment


def migrate(server: Any, database: str) -> None:
    """Make them in an empty database."""
    subprocess.run(
        [sys.executable, "manage.py", "migrate", "--run-syncdb", "--verbosity", "0"],
        cwd=CHECKOUT, env=environment(server.url(database), "migrate", Path("/dev/null")), check=True,
    )  # fmt: skip
    for statement in ledger.WORDS[server.vendor].tables:
        server.execute(statement, database=database)
