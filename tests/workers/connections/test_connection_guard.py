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
from tests.workers.connections.guarded_thread import GuardedThread

Handler = Callable[[GuardedThread], Any]

#: Where T-SQL has a word of its own.
BEGIN = {"postgresql": "BEGIN", "microsoft": "BEGIN TRANSACTION"}


# -- handlers that take the connection away, or leave it in the middle of something ------------------------------------


def closes(guarded: GuardedThread) -> None:
    guarded.connection.close()


def closes_all(guarded: GuardedThread) -> None:
    connections.close_all()


def closes_and_goes_on(guarded: GuardedThread) -> None:
    guarded.connection.close()
    guarded.connection.closed_in_transaction = False
    guarded.connection.connect()
    guarded.write("abuse")


def closes_in_a_block_of_its_own(guarded: GuardedThread) -> None:
    with transaction.atomic(using=guarded.alias):
        guarded.write("abuse")
        guarded.connection.close()


def closes_the_session_of_the_driver(guarded: GuardedThread) -> None:
    guarded.connection.connection.close()


def takes_the_session_away(guarded: GuardedThread) -> None:
    guarded.kept = guarded.connection.connection
    guarded.connection.connection = None


def puts_another_in_its_place(guarded: GuardedThread) -> None:
    connections[guarded.alias] = guarded.connection.copy()
    guarded.connection.set_autocommit(False)
    guarded.write("abuse")


def removes_it_from_the_registry(guarded: GuardedThread) -> None:
    del connections[guarded.alias]


def leaves_an_atomic_block_open(guarded: GuardedThread) -> None:
    transaction.atomic(using=guarded.alias).__enter__()
    guarded.write("abuse")


def leaves_two_atomic_blocks_open(guarded: GuardedThread) -> None:
    leaves_an_atomic_block_open(guarded)
    transaction.atomic(using=guarded.alias, savepoint=False).__enter__()
    transaction.on_commit(lambda: None, using=guarded.alias)


def leaves_a_block_open_from_a_coroutine(guarded: GuardedThread) -> None:
    async def coroutine() -> None:
        await sync_to_async(leaves_an_atomic_block_open)(guarded)

    async_to_sync(coroutine)()


def turns_autocommit_off_beneath_django(guarded: GuardedThread) -> None:
    guarded.connection.connection.autocommit = False


def leaves_a_failed_block_open(guarded: GuardedThread) -> None:
    transaction.atomic(using=guarded.alias).__enter__()
    with pytest.raises(Error):
        guarded.run("SELECT * FROM no_such_table")


TAKES_AWAY = [
    closes, closes_all, closes_in_a_block_of_its_own, closes_and_goes_on, closes_the_session_of_the_driver,
    takes_the_session_away, puts_another_in_its_place, removes_it_from_the_registry, leaves_an_atomic_block_open,
    leaves_two_atomic_blocks_open, leaves_a_failed_block_open, leaves_a_block_open_from_a_coroutine,
]  # fmt: skip


def turns_autocommit_off(guarded: GuardedThread) -> None:
    transaction.set_autocommit(False, using=guarded.alias)


def turns_autocommit_off_and_writes(guarded: GuardedThread) -> None:
    transaction.set_autocommit(False, using=guarded.alias)
    guarded.write("abuse")


def begins_by_itself(guarded: GuardedThread) -> None:
    guarded.run(BEGIN[guarded.vendor])
    guarded.write("abuse")


def begins_by_itself_and_meets_an_error(guarded: GuardedThread) -> None:
    guarded.run(BEGIN[guarded.vendor])
    with pytest.raises(Error):
        guarded.run("SELECT * FROM no_such_table")


def asked_without_an_error(guarded: GuardedThread, handler: Handler) -> None:
    """Skip what is noticed on PostgreSQL only; in the test's own thread, where a skip is one."""
    if handler is begins_by_itself and guarded.vendor != "postgresql":
        pytest.skip("only an error makes the worker ask SQL Server")


IN_AUTOCOMMIT = [
    *TAKES_AWAY, turns_autocommit_off, turns_autocommit_off_and_writes, turns_autocommit_off_beneath_django,
    begins_by_itself, begins_by_itself_and_meets_an_error,
]  # fmt: skip


@pytest.mark.parametrize("handler", IN_AUTOCOMMIT)
def test_what_a_handler_leaves_in_autocommit_is_reported_and_restored(guarded: GuardedThread, handler: Handler) -> None:
    asked_without_an_error(guarded, handler)
    state = guarded.in_autocommit(handler)

    assert state is not None
    assert state.replaced
    assert guarded.failed is None
    assert repr(guarded.alias) in str(state)
    assert handler is closes_and_goes_on or guarded.effects("abuse") == []
    guarded.do(guarded.is_as_opened)
    guarded.works()


@pytest.mark.parametrize("handler", IN_AUTOCOMMIT)
def test_handler_that_raises_as_well_keeps_its_own_reason(guarded: GuardedThread, handler: Handler) -> None:
    asked_without_an_error(guarded, handler)

    def raises(guarded: GuardedThread) -> None:
        handler(guarded)
        raise ValueError("no such flight")

    state = guarded.in_autocommit(raises)

    assert state is not None
    assert isinstance(guarded.failed, ValueError)
    assert state.__cause__ is guarded.failed
    guarded.do(guarded.is_as_opened)
    guarded.works()


# -- the same inside of the worker's transaction, and what is possible there only --------------------------------------


def commits_by_itself(guarded: GuardedThread) -> None:
    guarded.write("abuse")
    guarded.run("COMMIT")


def rolls_back_by_itself(guarded: GuardedThread) -> None:
    guarded.write("abuse")
    guarded.run("ROLLBACK")


def rolls_back_by_the_driver(guarded: GuardedThread) -> None:
    guarded.connection.connection.rollback()


def leaves_the_block_of_the_worker(guarded: GuardedThread) -> None:
    guarded.write("abuse")
    guarded.connection.atomic_blocks[-1].__exit__(None, None, None)


def leaves_the_block_of_the_worker_for_its_own(guarded: GuardedThread) -> None:
    leaves_the_block_of_the_worker(guarded)
    transaction.atomic(using=guarded.alias).__enter__()


IN_TRANSACTION = [*TAKES_AWAY, leaves_the_block_of_the_worker, leaves_the_block_of_the_worker_for_its_own]
ON_POSTGRESQL = [commits_by_itself, rolls_back_by_itself, rolls_back_by_the_driver]
COMMITTED = (commits_by_itself, leaves_the_block_of_the_worker, leaves_the_block_of_the_worker_for_its_own)


@pytest.mark.parametrize("handler", [*IN_TRANSACTION, *ON_POSTGRESQL])
def test_what_a_handler_leaves_in_the_workers_transaction_is_reported_and_restored(
    guarded: GuardedThread, handler: Handler
) -> None:
    if handler in ON_POSTGRESQL and guarded.vendor != "postgresql":
        pytest.skip("only an error makes the worker ask SQL Server")
    messages = guarded.server.put(Transactional)

    state = guarded.in_transaction(handler)

    assert state is not None
    assert state.replaced
    assert guarded.failed is None
    assert repr(guarded.alias) in str(state)
    if handler not in COMMITTED:
        assert handler is closes_and_goes_on or guarded.effects("abuse") == []
        assert guarded.messages() == messages, "nothing may have been committed"
        free = guarded.server.sql(Transactional).failures.lock(guarded.server.connection, messages[0], None, 10_000)
        assert free is not None, "no session may lock the message any more"
    guarded.do(guarded.is_as_opened)
    guarded.works()


@pytest.mark.parametrize("handler", IN_TRANSACTION)
def test_handler_that_raises_as_well_in_the_workers_transaction(guarded: GuardedThread, handler: Handler) -> None:
    messages = guarded.server.put(Transactional)

    def raises(guarded: GuardedThread) -> None:
        handler(guarded)
        raise ValueError("no such flight")

    state = guarded.in_transaction(raises)

    assert state is not None
    assert state.replaced
    assert state.__cause__ is guarded.failed
    assert handler in COMMITTED or guarded.messages() == messages
    guarded.do(guarded.is_as_opened)
    guarded.works()


@pytest.mark.parametrize("raised", [None, KeyError])
def test_block_of_the_worker_ends_in_silence_after_its_session_was_replaced(
    guarded: GuardedThread, raised: type[BaseException] | None
) -> None:
    def look() -> None:
        with (
            pytest.raises(raised) if raised else nullcontext(),
            transaction.atomic(using=guarded.alias),
            transaction.atomic(using=guarded.alias),
        ):
            guarded.write("abuse")
            guarded.guard.before()
            guarded.connection.close()
            after = guarded.guard.after()
            assert after is not None
            assert after.replaced
            with pytest.raises(Error):
                guarded.run("SELECT 1")
            if raised:
                raise raised
        assert guarded.connection.connection is None, "no session is opened to leave the block"
        guarded.is_as_opened()

    guarded.do(look)
    assert guarded.effects("abuse") == []
    guarded.works()


def test_task_that_overlooks_what_was_reported_commits_nothing(guarded: GuardedThread) -> None:
    def overlook(handler: Handler) -> None:
        with transaction.atomic(using=guarded.alias):
            guarded.write("abuse")
            guarded.guard.before()
            handler(guarded)
            assert guarded.guard.after() is not None

    def leaves_a_block_open_elsewhere(guarded: GuardedThread) -> None:
        transaction.atomic(using=guarded.elsewhere).__enter__()

    for handler in (closes, leaves_an_atomic_block_open, leaves_a_block_open_elsewhere):
        guarded.do(partial(overlook, handler))
        assert guarded.effects("abuse") == []
        guarded.works()
