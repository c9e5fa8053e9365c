"""The worker's transaction after a handler that returned: can it be committed, and is it still that one?"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from django.db import Error, IntegrityError, transaction

from tests.testapp.models import Effect, Transactional
from tests.workers.connections.desk import Desk

Handler = Callable[[Desk], Any]

# -- transactions that can only be rolled back --------------------------------------------------------------------------


def swallows_an_integrity_error(desk: Desk) -> None:
    one = Effect.objects.using(desk.alias).create(name="abuse")
    with suppress(IntegrityError):
        Effect.objects.using(desk.alias).create(pk=one.pk, name="abuse")


def swallows_the_error_of_raw_sql(desk: Desk) -> None:
    desk.write("abuse")
    with suppress(Error):
        desk.run("SELECT * FROM no_such_table")


def asks_for_a_rollback(desk: Desk) -> None:
    desk.write("abuse")
    transaction.set_rollback(True, using=desk.alias)


def swallows_what_a_block_without_savepoint_raised(desk: Desk) -> None:
    with suppress(KeyError), transaction.atomic(using=desk.alias, savepoint=False):
        desk.write("abuse")
        raise KeyError


def hides_a_failed_transaction_from_django(desk: Desk) -> None:
    swallows_an_integrity_error(desk)
    transaction.set_rollback(False, using=desk.alias)


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
def test_transaction_that_would_be_rolled_back_in_silence_is_a_failed_attempt(desk: Desk, handler: Handler) -> None:
    if desk.vendor != "postgresql" and handler not in KNOWN_TO_DJANGO:
        pytest.skip("SQL Server commits such a transaction")
    messages = desk.server.put(Transactional)

    left = desk.in_transaction(handler)

    assert left is not None
    assert not left.replaced, "rolled back in place, the message is not let go for longer than a statement"
    assert repr(desk.alias) in str(left)
    assert desk.messages() == messages
    assert desk.effects("abuse") == []
    desk.works()


def test_error_that_was_swallowed_is_the_cause(desk: Desk) -> None:
    desk.server.put(Transactional)

    left = desk.in_transaction(swallows_an_integrity_error)
    assert left is not None
    assert isinstance(left.__cause__, IntegrityError)

    # And not of the next one, though Django keeps it.
    left = desk.in_transaction(asks_for_a_rollback)
    assert left is not None
    assert left.__cause__ is None


def test_after_an_error_that_was_raised_the_rollback_is_had_in_place(desk: Desk) -> None:
    messages = desk.server.put(Transactional)

    def fails(desk: Desk) -> None:
        desk.write("abuse")
        desk.run("SELECT * FROM no_such_table")

    def fails_in_the_orm(desk: Desk) -> None:
        one = Effect.objects.using(desk.alias).create(name="abuse")
        Effect.objects.using(desk.alias).create(pk=one.pk, name="abuse")

    for handler in (fails, fails_in_the_orm):
        assert desk.in_transaction(handler) is None
        assert isinstance(desk.failed, Error)
        assert desk.messages() == messages
        assert desk.effects("abuse") == []
    desk.works()


def test_after_a_rollback_of_its_own_a_handler_that_raises_leaves_nothing_to_mend(desk: Desk) -> None:
    if desk.vendor != "postgresql":
        pytest.skip("T-SQL counts transactions, and its driver opens the next one at once")
    messages = desk.server.put(Transactional)

    def fails(desk: Desk) -> None:
        desk.run("ROLLBACK")
        raise ValueError("no such flight")

    assert desk.in_transaction(fails) is None
    assert isinstance(desk.failed, ValueError)
    assert desk.messages() == messages
    desk.works()


# -- a transaction that is not the one handed out -----------------------------------------------------------------------


def rolls_back_and_begins_anew(desk: Desk) -> None:
    desk.run("ROLLBACK")
    desk.run("BEGIN")
    desk.write("abuse")


def rolls_back_and_begins_anew_in_one_statement(desk: Desk) -> None:
    desk.run("ROLLBACK; BEGIN")


def rolls_back_by_the_driver_and_goes_on(desk: Desk) -> None:
    desk.connection.connection.rollback()
    desk.write("abuse")


@pytest.mark.parametrize(
    "handler",
    [rolls_back_and_begins_anew, rolls_back_and_begins_anew_in_one_statement, rolls_back_by_the_driver_and_goes_on],
)
def test_transaction_that_took_the_place_of_the_workers_is_noticed(desk: Desk, handler: Handler) -> None:
    if desk.vendor != "postgresql":
        pytest.skip("a ROLLBACK without an error is not noticed on SQL Server")
    messages = desk.server.put(Transactional)

    for _ in range(3):  # the driver's notes must tell each time
        left = desk.in_transaction(handler)

        assert left is not None
        assert not left.replaced
        assert "began another" in str(left)
        assert desk.messages() == messages
        assert desk.effects("abuse") == []
    desk.works()


def test_message_is_asked_for_only_when_a_rollback_was_seen(desk: Desk) -> None:
    asked = []

    def attempt(handler: Handler) -> Any:
        with transaction.atomic(using=desk.alias):
            desk.server.backend.now(desk.connection)  # a prepared statement, as a claim is one
            desk.handed.before()
            handler(desk)
            return desk.handed.after(None, lambda _: not asked.append(handler))

    def rolls_back_to_a_savepoint(desk: Desk) -> None:
        with suppress(KeyError), transaction.atomic(using=desk.alias):
            desk.write("abuse")
            raise KeyError

    def writes(desk: Desk) -> None:
        desk.write("kept")

    for handler in (writes, rolls_back_to_a_savepoint, writes):
        assert desk.do(lambda handler=handler: attempt(handler)) is None
    assert asked == ([rolls_back_to_a_savepoint] if desk.vendor == "postgresql" else [])
    assert len(desk.effects("kept")) == 2
