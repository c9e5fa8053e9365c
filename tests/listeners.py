"""What tests of wake-ups need besides the system's own ear: whether a database has wake-ups, and a way to cut who
listens."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import connections

from queueapp import notifier


def wakeable(alias: str) -> None:
    """Skip the test that calls this where the database has no wake-ups: Azure SQL Database, or no right to make what
    they need."""
    if (why := notifier.prepare(connections[alias])) is not None:
        pytest.skip(f"the database has no wake-ups: {why}")


def cut_ears(connection: Any) -> None:
    """Cut every connection that listens in this database, as an operator would."""
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'LISTEN%%' "
                "AND pid <> pg_backend_pid() AND datname = current_database()"
            )
            return
        cursor.execute(
            "SELECT r.session_id FROM sys.dm_exec_requests AS r WHERE r.database_id = DB_ID() "
            "AND r.wait_type LIKE 'BROKER_RECEIVE_WAITFOR%%' AND r.session_id <> @@SPID"
        )
        for (session,) in cursor.fetchall():
            cursor.execute(f"KILL {int(session)}")
