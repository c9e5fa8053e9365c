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
from tests.workers.connections.desk import Desk
from workers.connections.handed_out import HandedOut

Handler = Callable[[Desk], Any]


def does_nothing(desk: Desk) -> None:
    pass


def rolls_back_to_a_savepoint(desk: Desk) -> None:
    with suppress(Error), transaction.atomic(using=desk.alias):
        desk.run("SELECT * FROM no_such_table")
    with suppress(KeyError), transaction.atomic(using=desk.alias):
        desk.write("abuse")
        raise KeyError


def registers_a_hook(desk: Desk) -> None:
    with transaction.atomic(using=desk.alias):
        transaction.on_commit(lambda: desk.write("hook"), using=desk.alias)


def reads_half(desk: Desk) -> None:
    desk.write("one")
    desk.write("two")
    next(Effect.objects.using(desk.alias).iterator(chunk_size=1))


def uses_savepoints_of_its_own(desk: Desk) -> None:
    with transaction.atomic(using=desk.alias):
        transaction.savepoint_commit(transaction.savepoint(using=desk.alias), using=desk.alias)
        transaction.savepoint(using=desk.alias)


def meets_an_error_in_autocommit(desk: Desk) -> None:
    if not desk.connection.in_atomic_block:
        with suppress(Error):
            desk.run("SELECT * FROM no_such_table")


INNOCENT = [
    does_nothing,
    rolls_back_to_a_savepoint,
    registers_a_hook,
    reads_half,
    uses_savepoints_of_its_own,
    meets_an_error_in_autocommit,
]


@pytest.mark.parametrize("handler", INNOCENT)
def test_innocent_handler_keeps_its_session_and_its_transaction(desk: Desk, handler: Handler) -> None:
    def also_writes(desk: Desk) -> None:
        handler(desk)
        desk.write("kept")

    desk.server.put(Transactional)
    session = desk.do(lambda: (desk.run("SELECT 1"), desk.connection.connection)[1])

    assert desk.in_autocommit(also_writes) is None
    assert not desk.do(lambda: desk.connection.errors_occurred), "it was looked at since"
    assert desk.in_transaction(also_writes) is None
    assert desk.failed is None
    assert len(desk.effects("kept")) == 2
    assert len(desk.effects("hook")) == (2 if handler is registers_a_hook else 0)
    assert desk.effects("abuse") == []
    assert desk.messages() == []
    assert desk.do(lambda: desk.connection.connection is session)
    desk.works()


def test_connection_that_was_closed_when_it_was_handed_out_may_be_opened(desk: Desk) -> None:
    def attempt(handler: Handler) -> Any:
        desk.connection.close()
        desk.call(handler)
        return desk.handed.after(desk.failed)

    def leaves_a_block_open(desk: Desk) -> None:
        transaction.atomic(using=desk.alias).__enter__()

    assert desk.do(lambda: attempt(does_nothing)) is None
    assert desk.do(lambda: attempt(lambda desk: desk.write("kept"))) is None
    assert desk.do(lambda: attempt(leaves_a_block_open)) is not None
    assert len(desk.effects("kept")) == 1
    desk.works()


def test_session_that_a_failed_handler_has_opened_is_not_trusted(desk: Desk) -> None:
    """The failure may have struck while the session was being set up: without a time zone, in no role."""

    def attempt() -> Any:
        desk.connection.close()
        desk.call(lambda desk: (desk.write("kept"), desk.run("SELECT * FROM no_such_table")))
        return desk.handed.after(desk.failed), desk.connection.connection

    left, session = desk.do(attempt)
    assert left is not None
    assert left.__cause__ is desk.failed
    assert session is None
    desk.works()


def test_session_that_is_dead_when_it_is_handed_out_is_replaced(desk: Desk) -> None:
    def attempt() -> Any:
        desk.run("SELECT 1")
        desk.connection.connection.close()
        desk.call(lambda desk: desk.write("kept"))
        return desk.handed.after(desk.failed)

    assert desk.do(attempt) is None
    assert desk.failed is None
    assert len(desk.effects("kept")) == 1


#: What Django notes of a connection. It sets back some of it when it opens one, and asks the rest before that.
BOOKKEEPING = (
    "connection", "in_atomic_block", "savepoint_ids", "atomic_blocks", "commit_on_exit", "needs_rollback", "rollback_exc",
    "closed_in_transaction", "errors_occurred", "run_on_commit", "run_commit_hooks_on_set_autocommit_on",
)  # fmt: skip


def test_replaced_connection_is_opened_by_the_next_statement_wherever_it_was(desk: Desk) -> None:
    def replace() -> Any:
        transaction.atomic(using=desk.alias).__enter__()
        transaction.on_commit(lambda: None, using=desk.alias)
        desk.write("abuse")
        transaction.set_rollback(True, using=desk.alias)
        desk.handed.replace()
        new = desk.connection.copy()
        for name in BOOKKEEPING:
            assert getattr(desk.connection, name) == getattr(new, name), name
        desk.is_as_opened()

    desk.do(replace)
    assert desk.effects("abuse") == []
    desk.works()


def test_nothing_depends_on_where_django_keeps_its_connections(desk: Desk) -> None:
    desk.handed._opened = desk.handed._others._opened = None  # what another asgiref would make of it

    def leaves_both_open(desk: Desk) -> None:
        transaction.atomic(using=desk.alias).__enter__()
        transaction.atomic(using=desk.elsewhere).__enter__()

    left = desk.in_autocommit(leaves_both_open)
    assert left is not None
    assert len(left.reasons) == 2
    desk.works()


# -- PostgreSQL's own -----------------------------------------------------------------------------------------------------


def only_postgresql(desk: Desk) -> None:
    if desk.vendor != "postgresql":
        pytest.skip("PostgreSQL only")


def leaves_a_copy_open(desk: Desk) -> None:
    cursor = desk.connection.connection.cursor()
    desk.kept = cursor.copy("COPY testapp_effect (name, detail, at) FROM STDIN")
    desk.kept.__enter__()


def leaves_a_pipeline_open(desk: Desk) -> None:
    desk.kept = desk.connection.connection.pipeline()
    desk.kept.__enter__()
    desk.connection.connection.execute("SELECT 1")


def leaves_a_transaction_of_the_driver_open(desk: Desk) -> None:
    desk.kept = desk.connection.connection.transaction()
    desk.kept.__enter__()


def leaves_a_statement_running(desk: Desk) -> None:
    desk.connection.connection.pgconn.send_query(b"SELECT pg_sleep(600)")


def swallows_the_loss_of_its_session(desk: Desk) -> None:
    with suppress(Error):
        desk.run("SELECT pg_terminate_backend(pg_backend_pid())")


UNFINISHED = [
    leaves_a_copy_open,
    leaves_a_pipeline_open,
    leaves_a_transaction_of_the_driver_open,
    leaves_a_statement_running,
    swallows_the_loss_of_its_session,
]


@pytest.mark.parametrize("handler", UNFINISHED)
def test_session_that_cannot_be_used_any_more_is_replaced(desk: Desk, handler: Handler) -> None:
    only_postgresql(desk)
    messages = desk.server.put(Transactional)

    left = desk.in_autocommit(handler)
    assert left is not None
    assert left.replaced

    left = desk.in_transaction(lambda desk: (desk.write("abuse"), handler(desk)))
    assert left is not None
    assert left.replaced
    assert desk.messages() == messages
    # What the server was in the middle of is cancelled, and lets go of the message.
    eventually(lambda: desk.server.run("SELECT seq FROM testapp_transactional FOR UPDATE SKIP LOCKED"))
    assert desk.effects("abuse") == []
    desk.works()


def test_nothing_goes_over_the_line_when_all_is_well(desk: Desk, tmp_path: Path) -> None:
    only_postgresql(desk)

    def traced() -> bytes:
        lines = [connection.connection.pgconn for connection in (desk.connection, desk.other)]
        with (tmp_path / "line").open("w+b") as file:
            for line in lines:
                line.trace(file.fileno())
            desk.handed.before()
            assert desk.handed.after() is None
            for line in lines:
                line.untrace()
            return (tmp_path / "line").read_bytes()

    def look() -> None:
        desk.run("SELECT 1")
        desk.run("SELECT 1", desk.elsewhere)
        assert traced() == b""
        with transaction.atomic(using=desk.alias):
            desk.run("SELECT 1")
            assert traced() == b""

    desk.do(look)


def test_sessions_of_a_pool_go_back_to_it(desk: Desk) -> None:
    only_postgresql(desk)
    pytest.importorskip("psycopg_pool")
    of_the_pool = connections.settings["default"] | {
        "OPTIONS": connections.settings["default"]["OPTIONS"] | {"pool": {"min_size": 1, "max_size": 1, "timeout": 10}},
        "CONN_MAX_AGE": 0,
    }

    def use_the_pool() -> HandedOut:
        for alias in (desk.alias, desk.elsewhere):
            connections[alias] = type(desk.connection)(of_the_pool, alias)
        return HandedOut(desk.alias)

    desk.handed = desk.do(use_the_pool)

    def closes(desk: Desk) -> None:
        desk.kept = desk.connection.connection
        desk.connection.close()

    def leaves_a_block_open(desk: Desk) -> None:
        transaction.atomic(using=desk.alias).__enter__()

    def leaves_a_block_open_elsewhere(desk: Desk) -> None:
        transaction.atomic(using=desk.elsewhere).__enter__()

    # With one session in each pool, the one after a session that is not given back would wait in vain.
    for handler in (leaves_a_block_open, leaves_a_block_open_elsewhere, leaves_a_statement_running, closes):
        assert desk.in_autocommit(handler) is not None, handler
        assert handler is not closes or not desk.kept.closed, "the pool may have given it to another thread"
        assert desk.in_autocommit(does_nothing) is None
        desk.server.put(Transactional)
        assert desk.in_transaction(handler) is not None, handler
        desk.works()
    desk.do(lambda: [(each.close(), each.close_pool()) for each in (desk.connection, desk.other)])
