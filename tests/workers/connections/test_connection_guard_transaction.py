"""The worker's transaction after a handler that returned: can it be committed, and is it still that one?"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from django.db import Error, IntegrityError, transaction

from tests.testapp.models import Effect, Transactional
from tests.workers.connections.guarded_thread import GuardedThread

Handler = Callable[[GuardedThread], Any]

# -- transactions that can only be rolled back -------------------------------------------------------------------------


def swallows_an_integrity_error(guarded: GuardedThread) -> None:
    effect = Effect.objects.using(guarded.alias).create(name="abuse")
    with suppress(IntegrityError):
        Effect.objects.using(guarded.alias).create(pk=effect.pk, name="abuse")


def swallows_the_error_of_raw_sql(guarded: GuardedThread) -> None:
    guarded.write("abuse")
    with suppress(Error):
        guarded.run("SELECT * FROM no_such_table")


def asks_for_a_rollback(guarded: GuardedThread) -> None:
    guarded.write("abuse")
    transaction.set_rollback(True, using=guarded.alias)


def swallows_what_a_block_without_savepoint_raised(guarded: GuardedThread) -> None:
    with suppress(KeyError), transaction.atomic(using=guarded.alias, savepoint=False):
        guarded.write("abuse")
        raise KeyError


def hides_a_failed_transaction_from_django(guarded: GuardedThread) -> None:
    swallows_an_integrity_error(guarded)
    transaction.set_rollback(False, using=guarded.alias)


DOOMED = [
    swallows_an_integrity_error,
    swallows_the_error_of_raw_sql,
    asks_for_a_rollback,
    swallows_what_a_block_without_savepoint_raised,
    hides_a_failed_transaction_from_django,
]
#: SQL Server goes on with a transaction after an error, and commits it.
KNOWN_TO_DJANGO = (swallows_an_integrity_error, asks_for_a_rollback, swallows_what_a_block_without_savepoint_raised)


@pytest.mark.parametrize("handler", DOOMED)
def test_transaction_that_would_be_rolled_back_in_silence_is_a_failed_attempt(
    guarded: GuardedThread, handler: Handler
) -> None:
    if guarded.vendor != "postgresql" and handler not in KNOWN_TO_DJANGO:
        pytest.skip("SQL Server commits such a transaction")
    messages = guarded.server.put(Transactional)

    state = guarded.in_transaction(handler)

    assert state is not None
    assert not state.replaced, "rolled back in place, the message is not unlocked for longer than a statement"
    assert repr(guarded.alias) in str(state)
    assert guarded.messages() == messages
    assert guarded.effects("abuse") == []
    guarded.works()


def test_error_that_was_swallowed_is_the_cause(guarded: GuardedThread) -> None:
    guarded.server.put(Transactional)

    state = guarded.in_transaction(swallows_an_integrity_error)
    assert state is not None
    assert isinstance(state.__cause__, IntegrityError)

    # And not of the next one, though Django keeps it.
    state = guarded.in_transaction(asks_for_a_rollback)
    assert state is not None
    assert state.__cause__ is None


def test_after_an_error_that_was_raised_the_rollback_is_had_in_place(guarded: GuardedThread) -> None:
    messages = guarded.server.put(Transactional)

    def fails(guarded: GuardedThread) -> None:
        guarded.write("abuse")
        guarded.run("SELECT * FROM no_such_table")

    def fails_in_the_orm(guarded: GuardedThread) -> None:
        effect = Effect.objects.using(guarded.alias).create(name="abuse")
        Effect.objects.using(guarded.alias).create(pk=effect.pk, name="abuse")

    for handler in (fails, fails_in_the_orm):
        assert guarded.in_transaction(handler) is None
        assert isinstance(guarded.failed, Error)
        assert guarded.messages() == messages
        assert guarded.effects("abuse") == []
    guarded.works()


def test_after_a_rollback_of_its_own_a_handler_that_raises_leaves_nothing_to_mend(guarded: GuardedThread) -> None:
    if guarded.vendor != "postgresql":
        pytest.skip("T-SQL counts transactions, and its driver opens the next one at once")
    messages = guarded.server.put(Transactional)

    def fails(guarded: GuardedThread) -> None:
        guarded.run("ROLLBACK")
        raise ValueError("no such flight")

    assert guarded.in_transaction(fails) is None
    assert isinstance(guarded.failed, ValueError)
    assert guarded.messages() == messages
    guarded.works()


# -- a transaction that is not the one guard out -----------------------------------------------------------------------


def rolls_back_and_begins_anew(guarded: GuardedThread) -> None:
    guarded.run("ROLLBACK")
    guarded.run("BEGIN")
    guarded.write("abuse")


def rolls_back_and_begins_anew_in_one_statement(guarded: GuardedThread) -> None:
    guarded.run("ROLLBACK; BEGIN")


def rolls_back_by_the_driver_and_goes_on(guarded: GuardedThread) -> None:
    guarded.connection.connection.rollback()
    guarded.write("abuse")


@pytest.mark.parametrize(
    "handler",
    [rolls_back_and_begins_anew, rolls_back_and_begins_anew_in_one_statement, rolls_back_by_the_driver_and_goes_on],
)
def test_transaction_that_took_the_place_of_the_workers_is_noticed(guarded: GuardedThread, handler: Handler) -> None:
    if guarded.vendor != "postgresql":
        pytest.skip("a ROLLBACK without an error is not noticed on SQL Server")
    messages = guarded.server.put(Transactional)

    for _ in range(3):  # the driver's notes must tell each time
        state = guarded.in_transaction(handler)

        assert state is not None
        assert not state.replaced
        assert "began another" in str(state)
        assert guarded.messages() == messages
        assert guarded.effects("abuse") == []
    guarded.works()


def test_message_is_asked_for_only_when_a_rollback_was_seen(guarded: GuardedThread) -> None:
    asked = []

    def attempt(handler: Handler) -> Any:
        with transaction.atomic(using=guarded.alias):
            guarded.server.backend.now(guarded.connection)  # a prepared statement, as a claim is one
            guarded.guard.before()
            handler(guarded)
            return guarded.guard.after(None, lambda _: not asked.append(handler))

    def rolls_back_to_a_savepoint(guarded: GuardedThread) -> None:
        with suppress(KeyError), transaction.atomic(using=guarded.alias):
            guarded.write("abuse")
            raise KeyError

    def writes(guarded: GuardedThread) -> None:
        guarded.write("kept")

    for handler in (writes, rolls_back_to_a_savepoint, writes):
        assert guarded.do(lambda handler=handler: attempt(handler)) is None
    assert asked == ([rolls_back_to_a_savepoint] if guarded.vendor == "postgresql" else [])
    assert len(guarded.effects("kept")) == 2
