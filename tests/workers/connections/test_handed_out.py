"""What handlers leave behind on the worker's own connection: noticed, said, and mended before the next message."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.db import Error, connections, transaction

from tests.testapp.models import Transactional
from tests.workers.connections.desk import Desk

Handler = Callable[[Desk], Any]

#: Where T-SQL has a word of its own.
BEGIN = {"postgresql": "BEGIN", "microsoft": "BEGIN TRANSACTION"}


# -- handlers that take the connection away, or leave it in the middle of something -------------------------------------


def closes(desk: Desk) -> None:
    desk.connection.close()


def closes_all(desk: Desk) -> None:
    connections.close_all()


def closes_and_goes_on(desk: Desk) -> None:
    desk.connection.close()
    desk.connection.closed_in_transaction = False
    desk.connection.connect()
    desk.write("abuse")


def closes_in_a_block_of_its_own(desk: Desk) -> None:
    with transaction.atomic(using=desk.alias):
        desk.write("abuse")
        desk.connection.close()


def closes_the_session_of_the_driver(desk: Desk) -> None:
    desk.connection.connection.close()


def takes_the_session_away(desk: Desk) -> None:
    desk.kept = desk.connection.connection
    desk.connection.connection = None


def puts_another_in_its_place(desk: Desk) -> None:
    connections[desk.alias] = desk.connection.copy()
    desk.connection.set_autocommit(False)
    desk.write("abuse")


def removes_it_from_the_registry(desk: Desk) -> None:
    del connections[desk.alias]


def leaves_an_atomic_block_open(desk: Desk) -> None:
    transaction.atomic(using=desk.alias).__enter__()
    desk.write("abuse")


def leaves_two_atomic_blocks_open(desk: Desk) -> None:
    leaves_an_atomic_block_open(desk)
    transaction.atomic(using=desk.alias, savepoint=False).__enter__()
    transaction.on_commit(lambda: None, using=desk.alias)


def leaves_a_block_open_from_a_coroutine(desk: Desk) -> None:
    async def coroutine() -> None:
        await sync_to_async(leaves_an_atomic_block_open)(desk)

    async_to_sync(coroutine)()


def turns_autocommit_off_beneath_django(desk: Desk) -> None:
    desk.connection.connection.autocommit = False


def leaves_a_failed_block_open(desk: Desk) -> None:
    transaction.atomic(using=desk.alias).__enter__()
    with pytest.raises(Error):
        desk.run("SELECT * FROM no_such_table")


TAKES_AWAY = [
    closes, closes_all, closes_in_a_block_of_its_own, closes_and_goes_on, closes_the_session_of_the_driver,
    takes_the_session_away, puts_another_in_its_place, removes_it_from_the_registry, leaves_an_atomic_block_open,
    leaves_two_atomic_blocks_open, leaves_a_failed_block_open, leaves_a_block_open_from_a_coroutine,
]  # fmt: skip


def turns_autocommit_off(desk: Desk) -> None:
    transaction.set_autocommit(False, using=desk.alias)


def turns_autocommit_off_and_writes(desk: Desk) -> None:
    transaction.set_autocommit(False, using=desk.alias)
    desk.write("abuse")


def begins_by_itself(desk: Desk) -> None:
    desk.run(BEGIN[desk.vendor])
    desk.write("abuse")


def begins_by_itself_and_meets_an_error(desk: Desk) -> None:
    desk.run(BEGIN[desk.vendor])
    with pytest.raises(Error):
        desk.run("SELECT * FROM no_such_table")


def asked_without_an_error(desk: Desk, handler: Handler) -> None:
    """Skip what is noticed on PostgreSQL only; in the test's own thread, where a skip is one."""
    if handler is begins_by_itself and desk.vendor != "postgresql":
        pytest.skip("only an error makes the worker ask SQL Server")


IN_AUTOCOMMIT = [
    *TAKES_AWAY, turns_autocommit_off, turns_autocommit_off_and_writes, turns_autocommit_off_beneath_django,
    begins_by_itself, begins_by_itself_and_meets_an_error,
]  # fmt: skip


@pytest.mark.parametrize("handler", IN_AUTOCOMMIT)
def test_what_a_handler_leaves_in_autocommit_is_said_and_mended(desk: Desk, handler: Handler) -> None:
    asked_without_an_error(desk, handler)
    left = desk.in_autocommit(handler)

    assert left is not None
    assert left.replaced
    assert desk.failed is None
    assert repr(desk.alias) in str(left)
    assert handler is closes_and_goes_on or desk.effects("abuse") == []
    desk.do(desk.is_as_opened)
    desk.works()


@pytest.mark.parametrize("handler", IN_AUTOCOMMIT)
def test_handler_that_raises_as_well_keeps_its_own_reason(desk: Desk, handler: Handler) -> None:
    asked_without_an_error(desk, handler)

    def raises(desk: Desk) -> None:
        handler(desk)
        raise ValueError("no such flight")

    left = desk.in_autocommit(raises)

    assert left is not None
    assert isinstance(desk.failed, ValueError)
    assert left.__cause__ is desk.failed
    desk.do(desk.is_as_opened)
    desk.works()


# -- the same inside of the worker's transaction, and what is possible there only -----------------------------------------


def commits_by_itself(desk: Desk) -> None:
    desk.write("abuse")
    desk.run("COMMIT")


def rolls_back_by_itself(desk: Desk) -> None:
    desk.write("abuse")
    desk.run("ROLLBACK")


def rolls_back_by_the_driver(desk: Desk) -> None:
    desk.connection.connection.rollback()


def leaves_the_block_of_the_worker(desk: Desk) -> None:
    desk.write("abuse")
    desk.connection.atomic_blocks[-1].__exit__(None, None, None)


def leaves_the_block_of_the_worker_for_its_own(desk: Desk) -> None:
    leaves_the_block_of_the_worker(desk)
    transaction.atomic(using=desk.alias).__enter__()


IN_TRANSACTION = [*TAKES_AWAY, leaves_the_block_of_the_worker, leaves_the_block_of_the_worker_for_its_own]
ON_POSTGRESQL = [commits_by_itself, rolls_back_by_itself, rolls_back_by_the_driver]
COMMITTED = (commits_by_itself, leaves_the_block_of_the_worker, leaves_the_block_of_the_worker_for_its_own)


@pytest.mark.parametrize("handler", [*IN_TRANSACTION, *ON_POSTGRESQL])
def test_what_a_handler_leaves_in_the_workers_transaction_is_said_and_mended(desk: Desk, handler: Handler) -> None:
    if handler in ON_POSTGRESQL and desk.vendor != "postgresql":
        pytest.skip("only an error makes the worker ask SQL Server")
    messages = desk.server.put(Transactional)

    left = desk.in_transaction(handler)

    assert left is not None
    assert left.replaced
    assert desk.failed is None
    assert repr(desk.alias) in str(left)
    if handler not in COMMITTED:
        assert handler is closes_and_goes_on or desk.effects("abuse") == []
        assert desk.messages() == messages, "nothing may have been committed"
        free = desk.server.sql(Transactional).failures.lock(desk.server.connection, messages[0], None, 10_000)
        assert free is not None, "nobody may hold the message any more"
    desk.do(desk.is_as_opened)
    desk.works()


@pytest.mark.parametrize("handler", IN_TRANSACTION)
def test_handler_that_raises_as_well_in_the_workers_transaction(desk: Desk, handler: Handler) -> None:
    messages = desk.server.put(Transactional)

    def raises(desk: Desk) -> None:
        handler(desk)
        raise ValueError("no such flight")

    left = desk.in_transaction(raises)

    assert left is not None
    assert left.replaced
    assert left.__cause__ is desk.failed
    assert handler in COMMITTED or desk.messages() == messages
    desk.do(desk.is_as_opened)
    desk.works()


@pytest.mark.parametrize("raised", [None, KeyError])
def test_block_of_the_worker_ends_in_silence_after_its_session_was_replaced(
    desk: Desk, raised: type[BaseException] | None
) -> None:
    def look() -> None:
        with (
            pytest.raises(raised) if raised else nullcontext(),
            transaction.atomic(using=desk.alias),
            transaction.atomic(using=desk.alias),
        ):
            desk.write("abuse")
            desk.handed.before()
            desk.connection.close()
            left = desk.handed.after()
            assert left is not None
            assert left.replaced
            with pytest.raises(Error):
                desk.run("SELECT 1")
            if raised:
                raise raised
        assert desk.connection.connection is None, "no session is opened to leave the block"
        desk.is_as_opened()

    desk.do(look)
    assert desk.effects("abuse") == []
    desk.works()


def test_task_that_overlooks_what_was_said_commits_nothing(desk: Desk) -> None:
    def overlook(handler: Handler) -> None:
        with transaction.atomic(using=desk.alias):
            desk.write("abuse")
            desk.handed.before()
            handler(desk)
            assert desk.handed.after() is not None

    def leaves_a_block_open_elsewhere(desk: Desk) -> None:
        transaction.atomic(using=desk.elsewhere).__enter__()

    for handler in (closes, leaves_an_atomic_block_open, leaves_a_block_open_elsewhere):
        desk.do(partial(overlook, handler))
        assert desk.effects("abuse") == []
        desk.works()
