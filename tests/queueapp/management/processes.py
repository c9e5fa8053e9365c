"""Running ``manage.py`` as an operator does, on whatever settings or database."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.in_process_worker import patience

CHECKOUT = Path(__file__).parents[3]


def manage(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command without a terminal; it must end by itself."""
    return subprocess.run(
        [sys.executable, "manage.py", *arguments],
        cwd=CHECKOUT,
        env=os.environ | {"DJANGO_SETTINGS_MODULE": "tests.settings"} | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=patience(60),
        check=False,
    )


def only_line(done: subprocess.CompletedProcess[str]) -> str:
    """The one line of an error."""
    assert done.returncode == 1, done
    (line,) = done.stderr.splitlines()
    return line
