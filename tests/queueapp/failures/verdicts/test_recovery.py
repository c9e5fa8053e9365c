"""What becomes of a failed attempt, without a worker: the default policy, what is kept, and what is fenced."""

from __future__ import annotations

import threading
import uuid
from datetime import timedelta
from typing import Any

import pytest
from django.db import connections, transaction
from django.db.models import F

from queueapp import Context, Discard, Poison, RetryLater, RetryNow, UndecodableMessage, consumer
from queueapp.consuming.registry import Registration, registered
from queueapp.failures.apply_verdict import fail, fail_taken
from queueapp.failures.history import MAX_FAILURES, MAX_TEXT, describe, read_failures
from queueapp.failures.recoverability import Failure, default_policy
from queueapp.models import DelayedMessage, PoisonMessage
from queueapp.sql import queue_sql
from queueapp.sql.claims import SeqRange
from queueapp.sql.message_columns import Row
from tests.in_process_worker import real_commits
from tests.testapp.models import AtMostOnce, Leased, Transactional

ROW = Row(1, uuid.UUID(int=1), "{}", b"", deliveries=1)


def registration(**options: Any) -> Registration:
    def handle(message: Any, context: Context) -> None: ...

    return Registration(Leased, "tests", Any, handle, options)


def verdict(attempt: int, exception: BaseException | None = None, **options: Any) -> Any:
    return default_policy(Failure(Leased, registration(**options), ROW, exception or ValueError("bad"), attempt))


# -- the default policy --------------------------------------------------------------------------------------------


def test_immediate_retries_come_first_then_growing_waits_then_poison() -> None:
    options = {"attempts": 6, "immediate_retries": 2, "retry_delay": 10, "retry_delay_increase": 5}

    verdicts = [verdict(attempt, **options) for attempt in range(1, 7)]

    waits = [RetryLater(timedelta(seconds=seconds)) for seconds in (10, 15, 20)]
    assert verdicts == [RetryNow(), RetryNow(), *waits, Poison("failed 6 of 6 attempts: ValueError: bad")]


def test_a_wait_of_nothing_is_a_retry_at_once() -> None:
    assert verdict(1, attempts=2, retry_delay=0) == RetryNow()


def test_one_attempt_is_no_retry() -> None:
    assert isinstance(verdict(1, attempts=1), Poison)


@pytest.mark.parametrize(("exception", "poison"), [(KeyError("k"), True), (LookupError(), True), (ValueError(), False)])
def test_unrecoverable_exceptions_are_poison_at_once_subclasses_included(exception: Any, poison: bool) -> None:
    assert isinstance(verdict(1, exception, unrecoverable=(LookupError,)), Poison) is poison


def test_what_does_not_parse_is_poison_at_once() -> None:
    assert verdict(1, UndecodableMessage("no JSON")) == Poison("undecodable: UndecodableMessage: no JSON")


def test_jitter_is_added_and_never_taken_off() -> None:
    waits = {verdict(1, retry_delay=100, retry_jitter=0.5).delay.total_seconds() for _ in range(200)}

    assert min(waits) >= 100
    assert max(waits) <= 150
    assert len(waits) > 100


def test_options_of_the_project_hold_where_the_consumer_has_none(settings: Any) -> None:
    settings.QUEUEAPP = {"ATTEMPTS": 2, "RETRY_DELAY": 7}

    assert verdict(1) == RetryLater(timedelta(seconds=7))
    assert isinstance(verdict(2), Poison)
    unhandled = Failure(Leased, None, ROW, ValueError(), 2)
    assert isinstance(default_policy(unhandled), Poison)


# -- carrying it out -----------------------------------------------------------------------------------------------


@pytest.fixture
def held() -> tuple[int, uuid.UUID]:
    """(seq, token) of a leased message."""
    Leased.send({}, headers={"k": "v"})
    connection = connections["default"]
    token = uuid.uuid4()
    (row,) = queue_sql(Leased, connection).claims.claim_by_lease(connection, [SeqRange()], 1, token, token, 60_000)
    return row[0], token


def deciding(answer: Any) -> Registration:
    return registration(policy=lambda failure: answer)


@real_commits
def test_retry_now_leaves_the_message_in_its_place_with_its_history(held: Any) -> None:
    seq, token = held

    assert fail(Leased, "default", seq, ValueError("bad"), consumer=deciding(RetryNow()), token=token) == RetryNow()

    row = Leased.objects.get()
    assert (row.seq, row.deliveries, row.lease_token) == (seq, 1, None)
    (failure,) = read_failures(row.failures)
    assert (failure["attempt"], failure["exception"], failure["verdict"]) == (1, "ValueError: bad", "RetryNow")
    assert failure["host"]


@real_commits
def test_retry_later_moves_the_message_to_the_delayed_store(held: Any) -> None:
    seq, token = held
    later = RetryLater(timedelta(minutes=3))

    fail(Leased, "default", seq, ValueError(), consumer=deciding(later), token=token)

    assert not Leased.objects.exists()
    row = DelayedMessage.objects.annotate(wait=F("due") - F("stored_at")).get()
    assert row.wait == pytest.approx(timedelta(minutes=3), abs=timedelta(seconds=1))
    assert (row.destination, row.deliveries) == ("testapp.Leased", 1)


@real_commits
def test_poison_is_kept_with_where_and_why(held: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUEUEAPP_WORKER_VERSION", "1.2.3")
    seq, token = held

    fail(Leased, "default", seq, ValueError("bad"), consumer=deciding(Poison("because")), token=token)

    row = PoisonMessage.objects.get()
    assert (row.queue, row.consumer, row.reason, row.attempts) == ("testapp.Leased", "tests", "because", 1)
    assert (row.exception_type, row.exception_message) == ("ValueError", "bad")
    assert row.worker_version == "1.2.3"
    assert row.host
    assert row.process
    assert row.first_failed_at is not None
    assert '"k":"v"' in row.headers


@real_commits
def test_a_discarded_message_is_nowhere(held: Any) -> None:
    seq, token = held

    fail(Leased, "default", seq, ValueError(), consumer=deciding(Discard()), token=token)

    assert not Leased.objects.exists()
    assert not DelayedMessage.objects.exists()
    assert not PoisonMessage.objects.exists()


@real_commits
def test_a_failure_under_a_lost_lease_changes_nothing(held: Any) -> None:
    seq, _ = held

    assert fail(Leased, "default", seq, ValueError(), consumer=deciding(Discard()), token=uuid.uuid4()) is None

    assert Leased.objects.get().failures is None


@real_commits
def test_a_failure_of_a_message_that_is_gone_changes_nothing() -> None:
    assert fail(Leased, "default", 4711, ValueError(), consumer=deciding(Poison("x")), token=None) is None

    assert not PoisonMessage.objects.exists()


@real_commits
def test_an_attempt_without_a_lease_is_counted_with_its_failure() -> None:
    Transactional.send({})
    seq = Transactional.objects.get().seq

    for attempt in (1, 2):
        fail(Transactional, "default", seq, ValueError(), consumer=deciding(RetryNow()), token=None)
        assert Transactional.objects.get().deliveries == attempt


@real_commits
def test_a_failure_waits_for_the_lock_of_the_row_and_then_reports_that_it_is_locked() -> None:
    Transactional.send({})
    seq = Transactional.objects.get().seq
    locked, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with transaction.atomic():
            list(Transactional.objects.select_for_update().filter(seq=seq))
            locked.set()
            go_on.wait(30)
        connections.close_all()

    thread = threading.Thread(target=hold)
    thread.start()
    locked.wait(30)
    with pytest.raises(Exception, match="lock timeout"):
        fail(Transactional, "default", seq, ValueError(), consumer=None, token=None, wait=timedelta(milliseconds=50))
    go_on.set()
    thread.join(30)

    assert Transactional.objects.get().deliveries == 0


@real_commits
def test_what_was_received_at_most_once_is_kept_and_never_retried() -> None:
    AtMostOnce.send({})
    connection = connections["default"]
    sql = queue_sql(AtMostOnce, connection)
    (claimed,) = sql.claims.claim_by_delete(connection, [SeqRange()], 1, whole=True)
    row = sql.table.row_of(claimed)

    done = fail_taken(AtMostOnce, "default", row, ValueError("bad"), consumer=deciding(RetryLater(timedelta(1))))

    assert done == Poison("at-most-once, not retried: ValueError: bad")
    assert PoisonMessage.objects.get().attempts == 1


# -- what is written down ------------------------------------------------------------------------------------------


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def test_a_hostile_exception_is_described_all_the_same() -> None:
    class Awful(Exception):
        def __str__(self) -> str:
            return "\0 and \ud800 and " + "x" * 100_000

    reported = describe(raised(Awful()))

    assert len(reported["exception_message"]) <= MAX_TEXT
    assert len(reported["traceback"]) <= MAX_TEXT
    for text in reported.values():
        assert "\0" not in text
        text.encode()


def test_an_exception_that_cannot_be_shown_is_described_all_the_same() -> None:
    class Worse(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    assert "Worse" in describe(raised(Worse()))["exception_type"]


def test_failures_at_one_place_are_one_group() -> None:
    def one_place(text: str) -> BaseException:
        return raised(ValueError(text))

    def another_place() -> BaseException:
        try:
            int("x")
        except ValueError as caught:
            return caught
        raise AssertionError

    keys = [describe(error)["group_key"] for error in (one_place("a"), one_place("b"), another_place())]
    assert keys[0] == keys[1] != keys[2]
    assert describe(raised(KeyError()))["group_key"] != keys[0]


@real_commits
def test_of_a_long_history_the_first_and_the_last_attempts_are_kept() -> None:
    Transactional.send({})
    seq = Transactional.objects.get().seq

    for _ in range(MAX_FAILURES + 10):
        fail(Transactional, "default", seq, ValueError(), consumer=deciding(RetryNow()), token=None)

    attempts = [failure["attempt"] for failure in read_failures(Transactional.objects.get().failures)]
    assert len(attempts) == MAX_FAILURES
    assert attempts[:10] == list(range(1, 11))
    assert attempts[-10:] == list(range(MAX_FAILURES + 1, MAX_FAILURES + 11))


@pytest.mark.parametrize("stored", [None, "", "not JSON", "{}", "7"])
def test_a_history_that_does_not_parse_is_none(stored: str | None) -> None:
    assert read_failures(stored) == []


def test_the_headers_of_a_failure_are_those_that_are_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    failure = Failure(Leased, None, ROW._replace(headers='{"k": "v"}'), ValueError(), 1)

    failure.headers["k"] = "changed"

    assert failure.headers == {"k": "v"}
    assert Failure(Leased, None, ROW._replace(headers="not JSON"), ValueError(), 1).headers == {}


def test_a_policy_is_an_option_of_its_consumer(no_consumers: None) -> None:

    @consumer(Leased, policy=default_policy)
    def handle(message: Any) -> None: ...

    (registration,) = registered.of(Leased)
    assert registration.options["policy"] is default_policy
