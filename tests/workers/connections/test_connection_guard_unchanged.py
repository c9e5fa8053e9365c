"""What is not complained of, what it costs, and sessions that only PostgreSQL can leave in such a state."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from django.db import Error, connections, transaction

from tests.in_process_worker import eventually
from tests.testapp.models import Effect, Transactional
from tests.workers.connections.guarded_thread import GuardedThread
from workers.connections.connection_guard import ConnectionGuard

Handler = Callable[[GuardedThread], Any]


def does_nothing(guarded: GuardedThread) -> None:
    pass


def rolls_back_to_a_savepoint(guarded: GuardedThread) -> None:
    with suppress(Error), transaction.atomic(using=guarded.alias):
        guarded.run("SELECT * FROM no_such_table")
    with suppress(KeyError), transaction.atomic(using=guarded.alias):
        guarded.write("abuse")
        raise KeyError


def registers_a_hook(guarded: GuardedThread) -> None:
    with transaction.atomic(using=guarded.alias):
        transaction.on_commit(lambda: guarded.write("hook"), using=guarded.alias)


def reads_half(guarded: GuardedThread) -> None:
    guarded.write("one")
    guarded.write("two")
    next(Effect.objects.using(guarded.alias).iterator(chunk_size=1))


def uses_savepoints_of_its_own(guarded: GuardedThread) -> None:
    with transaction.atomic(using=guarded.alias):
        transaction.savepoint_commit(transaction.savepoint(using=guarded.alias), using=guarded.alias)
        transaction.savepoint(using=guarded.alias)


def meets_an_error_in_autocommit(guarded: GuardedThread) -> None:
    if not guarded.connection.in_atomic_block:
        with suppress(Error):
            guarded.run("SELECT * FROM no_such_table")


INNOCENT = [
    does_nothing,
    rolls_back_to_a_savepoint,
    registers_a_hook,
    reads_half,
    uses_savepoints_of_its_own,
    meets_an_error_in_autocommit,
]


@pytest.mark.parametrize("handler", INNOCENT)
def test_innocent_handler_keeps_its_session_and_its_transaction(guarded: GuardedThread, handler: Handler) -> None:
    def also_writes(guarded: GuardedThread) -> None:
        handler(guarded)
        guarded.write("kept")

    guarded.server.put(Transactional)
    session = guarded.do(lambda: (guarded.run("SELECT 1"), guarded.connection.connection)[1])

    assert guarded.in_autocommit(also_writes) is None
    assert not guarded.do(lambda: guarded.connection.errors_occurred), "it was looked at since"
    assert guarded.in_transaction(also_writes) is None
    assert guarded.failed is None
    assert len(guarded.effects("kept")) == 2
    assert len(guarded.effects("hook")) == (2 if handler is registers_a_hook else 0)
    assert guarded.effects("abuse") == []
    assert guarded.messages() == []
    assert guarded.do(lambda: guarded.connection.connection is session)
    guarded.works()


def test_connection_that_was_closed_when_it_was_handed_out_may_be_opened(guarded: GuardedThread) -> None:
    def attempt(handler: Handler) -> Any:
        guarded.connection.close()
        guarded.call(handler)
        return guarded.guard.after(guarded.failed)

    def leaves_a_block_open(guarded: GuardedThread) -> None:
        transaction.atomic(using=guarded.alias).__enter__()

    assert guarded.do(lambda: attempt(does_nothing)) is None
    assert guarded.do(lambda: attempt(lambda guarded: guarded.write("kept"))) is None
    assert guarded.do(lambda: attempt(leaves_a_block_open)) is not None
    assert len(guarded.effects("kept")) == 1
    guarded.works()


def test_session_that_a_failed_handler_has_opened_is_not_trusted(guarded: GuardedThread) -> None:
    """The failure may have come while the session was being set up: without a time zone, in no role."""

    def attempt() -> Any:
        guarded.connection.close()
        guarded.call(lambda guarded: (guarded.write("kept"), guarded.run("SELECT * FROM no_such_table")))
        return guarded.guard.after(guarded.failed), guarded.connection.connection

    remaining, session = guarded.do(attempt)
    assert remaining is not None
    assert remaining.__cause__ is guarded.failed
    assert session is None
    guarded.works()


def test_session_that_is_dead_when_it_is_handed_out_is_replaced(guarded: GuardedThread) -> None:
    def attempt() -> Any:
        guarded.run("SELECT 1")
        guarded.connection.connection.close()
        guarded.call(lambda guarded: guarded.write("kept"))
        return guarded.guard.after(guarded.failed)

    assert guarded.do(attempt) is None
    assert guarded.failed is None
    assert len(guarded.effects("kept")) == 1


#: What Django notes of a connection. It sets back some of it when it opens one, and asks the rest before that.
BOOKKEEPING = (
    "connection",
    "in_atomic_block",
    "savepoint_ids",
    "atomic_blocks",
    "commit_on_exit",
    "needs_rollback",
    "rollback_exc",
    "closed_in_transaction",
    "errors_occurred",
    "run_on_commit",
    "run_commit_hooks_on_set_autocommit_on",
)


def test_replaced_connection_is_opened_by_the_next_statement_wherever_it_was(guarded: GuardedThread) -> None:
    def replace() -> Any:
        transaction.atomic(using=guarded.alias).__enter__()
        transaction.on_commit(lambda: None, using=guarded.alias)
        guarded.write("abuse")
        transaction.set_rollback(True, using=guarded.alias)
        guarded.guard.replace()
        new = guarded.connection.copy()
        for name in BOOKKEEPING:
            assert getattr(guarded.connection, name) == getattr(new, name), name
        guarded.is_as_opened()

    guarded.do(replace)
    assert guarded.effects("abuse") == []
    guarded.works()


def test_nothing_depends_on_where_django_keeps_its_connections(guarded: GuardedThread) -> None:
    guarded.guard._by_alias = guarded.guard._other_aliases._by_alias = None  # what another asgiref would make of it

    def leaves_both_open(guarded: GuardedThread) -> None:
        transaction.atomic(using=guarded.alias).__enter__()
        transaction.atomic(using=guarded.elsewhere).__enter__()

    state = guarded.in_autocommit(leaves_both_open)
    assert state is not None
    assert len(state.reasons) == 2
    guarded.works()


# -- PostgreSQL's own --------------------------------------------------------------------------------------------------


def only_postgresql(guarded: GuardedThread) -> None:
    if guarded.vendor != "postgresql":
        pytest.skip("PostgreSQL only")


def leaves_a_copy_open(guarded: GuardedThread) -> None:
    cursor = guarded.connection.connection.cursor()
    guarded.kept = cursor.copy("COPY testapp_effect (name, detail, at) FROM STDIN")
    guarded.kept.__enter__()


def leaves_a_pipeline_open(guarded: GuardedThread) -> None:
    guarded.kept = guarded.connection.connection.pipeline()
    guarded.kept.__enter__()
    guarded.connection.connection.execute("SELECT 1")


def leaves_a_transaction_of_the_driver_open(guarded: GuardedThread) -> None:
    guarded.kept = guarded.connection.connection.transaction()
    guarded.kept.__enter__()


def leaves_a_statement_running(guarded: GuardedThread) -> None:
    guarded.connection.connection.pgconn.send_query(b"SELECT pg_sleep(600)")


def swallows_the_loss_of_its_session(guarded: GuardedThread) -> None:
    with suppress(Error):
        guarded.run("SELECT pg_terminate_backend(pg_backend_pid())")


UNFINISHED = [
    leaves_a_copy_open,
    leaves_a_pipeline_open,
    leaves_a_transaction_of_the_driver_open,
    leaves_a_statement_running,
    swallows_the_loss_of_its_session,
]


@pytest.mark.parametrize("handler", UNFINISHED)
def test_session_that_cannot_be_used_any_more_is_replaced(guarded: GuardedThread, handler: Handler) -> None:
    only_postgresql(guarded)
    messages = guarded.server.put(Transactional)

    state = guarded.in_autocommit(handler)
    assert state is not None
    assert state.replaced

    state = guarded.in_transaction(lambda guarded: (guarded.write("abuse"), handler(guarded)))
    assert state is not None
    assert state.replaced
    assert guarded.messages() == messages
    # What the server was in the middle of is cancelled, and the message is unlocked.
    eventually(lambda: guarded.server.run("SELECT seq FROM testapp_transactional FOR UPDATE SKIP LOCKED"))
    assert guarded.effects("abuse") == []
    guarded.works()


def test_nothing_goes_over_the_line_when_all_is_well(guarded: GuardedThread, tmp_path: Path) -> None:
    only_postgresql(guarded)

    def traced() -> bytes:
        lines = [connection.connection.pgconn for connection in (guarded.connection, guarded.second_alias)]
        with (tmp_path / "line").open("w+b") as file:
            for line in lines:
                line.trace(file.fileno())
            guarded.guard.before()
            assert guarded.guard.after() is None
            for line in lines:
                line.untrace()
            return (tmp_path / "line").read_bytes()

    def look() -> None:
        guarded.run("SELECT 1")
        guarded.run("SELECT 1", guarded.elsewhere)
        assert traced() == b""
        with transaction.atomic(using=guarded.alias):
            guarded.run("SELECT 1")
            assert traced() == b""

    guarded.do(look)


def test_sessions_of_a_pool_go_back_to_it(guarded: GuardedThread) -> None:
    only_postgresql(guarded)
    pytest.importorskip("psycopg_pool")
    of_the_pool = connections.settings["default"] | {
        "OPTIONS": connections.settings["default"]["OPTIONS"] | {"pool": {"min_size": 1, "max_size": 1, "timeout": 10}},
        "CONN_MAX_AGE": 0,
    }

    def use_the_pool() -> ConnectionGuard:
        for alias in (guarded.alias, guarded.elsewhere):
            connections[alias] = type(guarded.connection)(of_the_pool, alias)
        return ConnectionGuard(guarded.alias)

    guarded.guard = guarded.do(use_the_pool)

    def closes(guarded: GuardedThread) -> None:
        guarded.kept = guarded.connection.connection
        guarded.connection.close()

    def leaves_a_block_open(guarded: GuardedThread) -> None:
        transaction.atomic(using=guarded.alias).__enter__()

    def leaves_a_block_open_elsewhere(guarded: GuardedThread) -> None:
        transaction.atomic(using=guarded.elsewhere).__enter__()

    # With one session in each pool, the one after a session that is not given back would wait in vain.
    for handler in (leaves_a_block_open, leaves_a_block_open_elsewhere, leaves_a_statement_running, closes):
        assert guarded.in_autocommit(handler) is not None, handler
        assert handler is not closes or not guarded.kept.closed, "the pool may have given it to another thread"
        assert guarded.in_autocommit(does_nothing) is None
        guarded.server.put(Transactional)
        assert guarded.in_transaction(handler) is not None, handler
        guarded.works()
    guarded.do(lambda: [(item.close(), item.close_pool()) for item in (guarded.connection, guarded.second_alias)])
