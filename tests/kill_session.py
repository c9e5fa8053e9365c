"""Ending a session on the server's side, as an operator or a failover does: ``pg_terminate_backend``, ``KILL``."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from asgiref.sync import sync_to_async
from django.db import DatabaseError, Error, connections

from tests.testapp.models import Effect

_OWN_SESSION = {"postgresql": "SELECT pg_backend_pid()", "microsoft": "SELECT @@SPID"}
_OTHER_SESSIONS = {
    "postgresql": "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() "
    "AND backend_type = 'client backend'",
    "microsoft": "SELECT session_id FROM sys.dm_exec_sessions WHERE database_id = DB_ID() AND session_id <> @@SPID "
    "AND is_user_process = 1",
}


def session_of(connection: Any) -> int:
    """What its server calls the session of a Django connection."""
    with connection.cursor() as cursor:
        cursor.execute(_OWN_SESSION[connection.vendor])
        return int(cursor.fetchone()[0])


def kill(connection: Any, session: int) -> None:
    """End a session from another one; its next user gets the error."""
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute("SELECT pg_terminate_backend(%s, 10000)", [session])
        else:
            cursor.execute(f"KILL {int(session)}")  # takes no parameter


def kill_this(connection: Any) -> None:
    """End the session of a connection, from a session that is opened for it."""
    session, second_connection = session_of(connection), connection.copy()
    try:
        kill(second_connection, session)
    finally:
        second_connection.close()


def kill_all_others(connection: Any) -> None:
    """End every other session in the connection's database. That of the async ORM's thread, which outlives each test,
    is closed first: the next test that awaits a query would find it dead."""
    asyncio.run(sync_to_async(connections.close_all)())
    with connection.cursor() as cursor:
        cursor.execute(_OTHER_SESSIONS[connection.vendor])
        sessions = [int(session) for (session,) in cursor.fetchall()]
    for session in sessions:
        try:
            kill(connection, session)
        except Error:
            if connection.vendor == "postgresql":
                raise
            # 6106: it has ended by itself meanwhile.


def deadlock_victim(connection: Any) -> DatabaseError:
    """The error of a real deadlock's victim, as Django raises it."""
    alias = connection.alias
    rows = [Effect.objects.using(alias).create(name=f"deadlock {n}") for n in range(2)]
    both_hold, errors = threading.Barrier(2), []

    def lock_both(first: Any, second: Any) -> None:
        session = connection.copy()
        session.inc_thread_sharing()
        try:
            session.set_autocommit(False)
            with session.cursor() as cursor:
                cursor.execute("UPDATE testapp_effect SET detail = 'locked' WHERE id = %s", [first.pk])
                both_hold.wait(30)
                cursor.execute("UPDATE testapp_effect SET detail = 'locked' WHERE id = %s", [second.pk])
            session.rollback()
        except DatabaseError as error:
            errors.append(error)
        finally:
            session.close()

    threads = [threading.Thread(target=lock_both, args=pair) for pair in (rows, rows[::-1])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    Effect.objects.using(alias).filter(pk__in=[row.pk for row in rows]).delete()
    (victim,) = errors
    return victim
