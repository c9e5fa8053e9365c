"""What the server was asked and what it wrote in a stretch of time: statements, and bytes of WAL.

Statements are counted in the log of the embedded server, which is configured to log those of the benchmarks' database,
without their parameters; BEGIN and COMMIT are some, too. Logging slows everything down, so nothing is timed meanwhile.
The log of another server is out of reach.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from django.db import connection

from tests.benchmarks.rig.wal import position

_LOGGED = {"log_statement": "'all'", "log_parameter_max_length": "0"}
_STATEMENT = re.compile(rb"^\S+ \S+ \S+ \[\d+\] LOG:  (?:statement|execute [^:]+): ", re.MULTILINE)


class Asked(NamedTuple):
    """Per message."""

    statements: float
    bytes: float


@contextmanager
def logged() -> Iterator[None]:
    """Sessions that begin now log their statements; ours begins anew, now and in the end."""
    _alter("SET {} = {}")
    try:
        yield
    finally:
        _alter("RESET {}")


def asked(messages: int, action: Callable[[], object]) -> Asked:
    """What so many messages came to. The statement that reads the WAL's end is not one of them."""
    log = server_log()
    assert log is not None
    begin = position()
    offset = log.stat().st_size
    action()
    with log.open("rb") as file:
        file.seek(offset)
        statements = len(_STATEMENT.findall(file.read()))
    return Asked(statements / messages, (position() - begin) / messages)


def server_log() -> Path | None:
    """The log of the embedded server; None: it is another server, or one that is not ours to read."""
    if connection.settings_dict["ENGINE"] != "project.embedded_backend":
        return None
    with connection.cursor() as cursor:
        cursor.execute("SHOW data_directory")
        log = Path(cursor.fetchone()[0]).parent / "server.log"
    return log if log.exists() else None


def _alter(what: str) -> None:
    name = connection.ops.quote_name(connection.settings_dict["NAME"])
    with connection.cursor() as cursor:
        for setting, value in _LOGGED.items():
            cursor.execute(f"ALTER DATABASE {name} {what.format(setting, value)}")
    connection.close()
