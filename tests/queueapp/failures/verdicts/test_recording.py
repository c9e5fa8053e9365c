"""Recording a failed attempt cannot fail: whatever a handler or a policy brings along, or happens meanwhile, the
message ends in one place, with its bytes, and with the reason; and no other message is affected."""

from __future__ import annotations

import threading
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.db import DataError, Error, OperationalError, connection, connections, transaction
from django.db.models import F
from django.db.models.signals import post_save
from psycopg.errors import LockNotAvailable

from queueapp import signals
from queueapp.delayed import dispatch_due
from queueapp.failures import apply_verdict, poison_store
from queueapp.failures.apply_verdict import fail
from queueapp.failures.history import attempts_of, read_failures
from queueapp.failures.poison_store import is_transient
from queueapp.failures.recoverability import Discard, Poison, RetryLater, RetryNow
from queueapp.models import DelayedMessage, PoisonMessage
from tests.in_process_worker import real_commits
from tests.testapp.models import Leased, Transactional

from .failing import EVERY, IN_ITS_TABLE, Failed, Fussy, Message, Unspeakable, consumer, deciding

pytestmark = [
    real_commits,
    pytest.mark.skipif(connection.vendor != "postgresql", reason="what the tables refuse is written for PostgreSQL"),
]


# -- what a handler and a policy bring along ------------------------------------------------------------------------


@EVERY
@pytest.mark.parametrize("value", [object(), "yesterday", datetime(2026, 1, 1), b"\xff", float("nan"), {1: {2}}])
def test_what_a_handler_leaves_in_its_items_is_not_recorded_as_anything_else(message: Message, value: Any) -> None:
    message.put()

    message.fail(deciding(Poison("tests")), items={"at": value, "policy_error": value, value.__class__: value})

    row = message.kept()
    assert (row.reason, row.attempts) == ("tests", 1)
    assert row.first_failed_at is not None


@EVERY
@pytest.mark.parametrize(
    ("reason", "kept"),
    [(None, "no reason was given"), ("a\0b", "a\ufffdb"), ("\ud800!", "?!"), (7, "7"), ("x" * 9999, "x" * 500),
     ("🚀" * 400, "🚀" * 250), (Unspeakable(), "(its __str__ raised RuntimeError)")],
)  # fmt: skip
def test_a_reason_that_is_no_text_of_a_column_is_still_a_reason(message: Message, reason: Any, kept: str) -> None:
    message.put()

    verdict = message.fail(deciding(Poison(reason)))

    assert message.kept().reason == kept
    assert verdict == Poison(kept)


@IN_ITS_TABLE
@pytest.mark.parametrize("delay", [timedelta.max, timedelta(days=36501), "soon", 5, None])
def test_a_delay_that_makes_no_sense_leaves_the_decision_to_the_default_policy(message: Message, delay: Any) -> None:
    message.put()

    message.fail(consumer(lambda failure: RetryLater(delay), retry_delay=60))

    row = DelayedMessage.objects.annotate(wait=F("due") - F("stored_at")).get()
    assert timedelta(seconds=59) < row.wait < timedelta(minutes=5)
    assert not message.queue.objects.exists()


@IN_ITS_TABLE
def test_a_delay_into_the_past_is_none(message: Message) -> None:
    message.put()

    message.fail(deciding(RetryLater(timedelta.min)))

    assert dispatch_due("default", 10).moved == 1


class Broken(Poison):
    @property
    def reason(self) -> str:  # type: ignore[override]
        raise RuntimeError("no reason")

    def __init__(self) -> None: ...


@EVERY
@pytest.mark.parametrize("nonsense", [None, "poison", Poison, Broken(), Unspeakable()])
def test_what_is_no_verdict_leaves_the_decision_to_the_default_policy(message: Message, nonsense: Any) -> None:
    message.put()

    message.fail(consumer(lambda failure: nonsense, attempts=1))

    expected = "failed 1 of 1 attempts: Failed: bad"
    assert message.kept().reason == expected


@EVERY
def test_a_discarded_message_is_gone_whatever_its_reason(message: Message) -> None:
    message.put()

    assert message.fail(deciding(Discard("a\0\ud800"))) == Discard("a\ufffd?")

    assert not message.queue.objects.exists()
    assert not PoisonMessage.objects.exists()


@EVERY
@pytest.mark.parametrize("rude", ["close", "swallow", "raise"])
def test_a_policy_that_spoils_the_connection_costs_its_message_and_nothing_else(message: Message, rude: str) -> None:
    asked: list[int] = []

    def policy(failure: Any) -> Any:
        asked.append(1)
        if rude == "close":
            connection.close()
        if rude == "swallow":
            try:
                with connection.cursor() as cursor:
                    cursor.execute("SELECT 1 / 0")
            except Exception:
                pass
        if rude == "raise":
            raise Unspeakable
        return Poison("tests")

    message.put()
    message.fail(consumer(policy, attempts=1))

    message.kept()
    assert 1 <= len(asked) <= apply_verdict.TRIES
    message.put()
    message.fail(deciding(Discard()))
    assert not message.queue.objects.exists(), "the connection is as good as before"


@EVERY
@pytest.mark.parametrize("error", [Unspeakable(), Failed("\0\ud800" * 9999), Fussy(), KeyError(Unspeakable())])
def test_whatever_was_raised_is_recorded(message: Message, error: BaseException) -> None:
    message.put()

    message.fail(consumer(attempts=1, unrecoverable=(Fussy,)), error)

    row = message.kept()
    assert type(error).__name__ in row.exception_type
    assert "\0" not in row.exception_message + row.traceback + row.reason


@EVERY
def test_receivers_of_djangos_signals_have_no_influence(message: Message) -> None:
    def refuse(sender: Any, **kwargs: Any) -> None:
        if sender in (PoisonMessage, DelayedMessage):
            raise RuntimeError("not with me")

    post_save.connect(refuse)
    try:
        for verdict in (Poison("tests"), RetryLater(timedelta(0))):
            message.put()
            message.fail(deciding(verdict))
    finally:
        post_save.disconnect(refuse)

    assert PoisonMessage.objects.count() + DelayedMessage.objects.count() == 2


# -- what passes by itself ------------------------------------------------------------------------------------------


def lose_connection() -> None:
    """The server ends this thread's session."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        pid = cursor.fetchone()[0]

    def kill() -> None:
        with connections["default"].cursor() as second_cursor:
            second_cursor.execute("SELECT pg_terminate_backend(%s)", [pid])
        connections["default"].close()

    thread = threading.Thread(target=kill)
    thread.start()
    thread.join()


@IN_ITS_TABLE
@pytest.mark.parametrize("inserts", [1, 2])
def test_a_locked_poison_table_is_reported_and_costs_the_record_no_details(
    message: Message, inserts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the first record, or at the bare one after a value that was refused."""
    locked = OperationalError("canceling statement due to lock timeout")
    locked.__cause__ = LockNotAvailable()
    tried: list[None] = []

    def insert(alias: str, **columns: Any) -> None:
        tried.append(None)
        raise locked if len(tried) == inserts else DataError("a value out of range")

    monkeypatch.setattr(poison_store, "insert", insert)
    message.put()

    with pytest.raises(OperationalError) as caught:
        message.fail(deciding(Poison("tests")))

    assert is_transient(caught.value, "default")
    assert len(tried) == inserts
    assert message.queue.objects.get().failures is None


def test_a_lost_connection_is_reported_and_nothing_is_changed() -> None:
    message = Message(Transactional)
    message.put()
    seq = Transactional.objects.get().seq
    lose_connection()

    with pytest.raises(Error) as caught:
        fail(Transactional, "default", seq, Failed(), consumer=deciding(Poison("tests")), token=None)

    assert is_transient(caught.value, "default")
    connection.close()
    assert Transactional.objects.get().failures is None
    assert not PoisonMessage.objects.exists()


def fails_while_the_connection_is_lost(message: Message) -> None:
    """Its policy loses the connection; asked again it decides, and the message is kept."""
    asked: list[int] = []

    def policy(failure: Any) -> Any:
        asked.append(1)
        if len(asked) == 1:
            lose_connection()
        return Poison("tests")

    message.fail(consumer(policy))

    assert message.kept().reason == "tests"
    assert len(asked) == 2


@IN_ITS_TABLE
def test_a_connection_that_is_lost_while_a_policy_decides_costs_nothing(message: Message) -> None:
    message.put()
    fails_while_the_connection_is_lost(message)


def test_what_broke_an_earlier_transaction_is_no_reason_to_try_this_one_for_ever() -> None:
    """A lost connection, say, that the handler has got over."""

    def broken() -> None:
        with transaction.atomic():
            lose_connection()
            with transaction.mark_for_rollback_on_error("default"):
                Leased.objects.count()

    with pytest.raises(OperationalError):
        broken()
    connection.close()
    assert connection.rollback_exc is not None

    message = Message(Leased)
    message.put()
    fails_while_the_connection_is_lost(message)


def test_an_unavailable_store_is_reported_and_nothing_is_changed() -> None:
    message = Message(Leased)
    message.put()
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE queueapp_delayedmessage RENAME TO away")
    try:
        with pytest.raises(apply_verdict.StoreFailed):
            message.fail(deciding(RetryLater(timedelta(1))))
    finally:
        with connection.cursor() as cursor:
            cursor.execute("ALTER TABLE away RENAME TO queueapp_delayedmessage")

    assert Leased.objects.get().failures is None


@EVERY
def test_what_happens_once_it_is_recorded_is_no_failure_of_it(message: Message, monkeypatch: Any) -> None:
    def speechless(*args: Any) -> None:
        raise RuntimeError("no words")

    monkeypatch.setattr(signals, "send", speechless)
    message.put()

    message.fail(deciding(Poison("tests")))

    message.kept()


# -- the count ------------------------------------------------------------------------------------------------------


@IN_ITS_TABLE
def test_a_failed_attempt_is_counted_once_however_often_it_is_recorded(message: Message) -> None:
    message.put()
    for attempt in (1, 2, 3):
        message.fail(deciding(RetryNow()))
        row = message.queue.objects.get()
        assert attempts_of(row.failures) == attempt == len(read_failures(row.failures))
        assert row.deliveries == attempt
