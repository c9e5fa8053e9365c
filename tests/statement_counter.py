"""Counts what a process sends to PostgreSQL, in a file that its parent reads: a byte for each statement."""

from __future__ import annotations

import os
from typing import Any

import psycopg

#: Names the file.
VARIABLE = "TEST_COUNT_STATEMENTS"


def count_statements() -> None:
    """From now on, if the environment says where: what goes through cursors, and what the queues pack themselves."""
    path = os.environ.get(VARIABLE)
    if not path:
        return
    from queueapp.sql.postgresql.raw.raw_statement import OpeningQuery, RawStatement

    tally = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    plain, packed, conversation = psycopg.Cursor.execute, RawStatement._run, OpeningQuery._conversation

    def execute(self: Any, *args: Any, **kwargs: Any) -> Any:
        os.write(tally, b".")
        return plain(self, *args, **kwargs)

    def run(self: Any, *args: Any) -> Any:
        os.write(tally, b".")
        return packed(self, *args)

    def converse(self: Any, pgconn: Any, before: Any, *args: Any) -> Any:
        os.write(tally, b"." * (len(before) + 1))
        return conversation(self, pgconn, before, *args)

    psycopg.Cursor.execute = execute  # type: ignore[method-assign,assignment]
    RawStatement._run = run  # type: ignore[method-assign]
    OpeningQuery._conversation = converse  # type: ignore[method-assign]
