"""What goes over the wire of PostgreSQL, by libpq's own trace."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from django.db import connection

from queueapp.sql.postgresql.raw.plan_guard import PlanGuard


@contextmanager
def traced() -> Iterator[list[str]]:
    """Fills a list with what this thread's connection and its server say in the block, a line for each message. Without
    the looks at plans of statements that a busy machine is slow with, and what comes of them."""
    connection.ensure_connection()
    pgconn, lines = connection.connection.pgconn, list[str]()
    with tempfile.TemporaryFile("w+b") as file, pytest.MonkeyPatch.context() as patched:
        patched.setattr(PlanGuard, "_run", lambda _, run, __, *statement, **___: run(*statement))
        patched.setattr(PlanGuard, "record_time", lambda *_, **__: None)
        pgconn.trace(file.fileno())
        try:
            yield lines
        finally:
            pgconn.untrace()
            file.seek(0)
            lines += file.read().decode(errors="replace").splitlines()


@contextmanager
def statements() -> Iterator[list[str]]:
    """What this connection says to its server, statement by statement: their texts."""
    said: list[str] = []
    with traced() as lines:
        yield said
    with connection.cursor() as cursor:
        cursor.execute("SELECT name, statement FROM pg_prepared_statements")
        names: dict[str, str] = dict(cursor.fetchall())
    for line in lines:
        if found := re.search(r'\tF\t\d+\tParse\t "([^"]*)" "(.*)" \d+', line):
            names[found[1]] = found[2]
        elif found := re.search(r'\tF\t\d+\tBind\t "[^"]*" "([^"]*)"', line):
            said.append(names.get(found[1], found[1]))
        elif found := re.search(r'\tF\t\d+\tQuery\t "(.*)"', line):
            said.append(found[1])
