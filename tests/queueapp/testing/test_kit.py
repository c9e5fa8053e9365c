"""The testing kit: consumers run in the test's own thread and transaction, and judged as in a worker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from django.db import IntegrityError, connection, transaction

from queueapp import Context, Discard, Poison, Queue, QueueError, RetryLater, RetryNow, consumer
from queueapp.models import PoisonMessage, Subscriber
from queueapp.schedules import declarations
from queueapp.testing import Kit, Sent
from tests.databases import DATABASES, marks_of
from tests.testapp.models import (
    Addressed,
    AtMostOnce,
    CappedOnce,
    Effect,
    InTurns,
    Leased,
    Short,
    Transactional,
    Urgent,
)
from tests.testapp.ordering import Fenced

SEMANTICS = (Leased, Transactional, AtMostOnce)


class Shipped(msgspec.Struct):
    order: int


@pytest.fixture(autouse=True)
def no_consumers(no_consumers: None) -> None:
    """Only the consumers that the test registers."""


@pytest.fixture(params=[False, True], ids=["in the test's transaction", "with real commits"])
def kit(request: pytest.FixtureRequest) -> Iterator[Kit]:
    """A kit in a test case's transaction, and in one without."""
    request.getfixturevalue("transactional_db" if request.param else "db")
    kit = Kit()
    yield kit
    kit.close()


def effects() -> list[str]:
    return list(Effect.objects.order_by("pk").values_list("name", flat=True))


def register(queue: Any, handler: Callable[..., Any], **options: Any) -> None:
    consumer(queue, **options)(handler)


@pytest.mark.parametrize("queue", SEMANTICS)
def test_a_message_is_handled_and_gone(kit: Kit, queue: type[Queue]) -> None:
    @consumer(queue)
    def note(message: dict, context: Context) -> None:
        Effect.objects.create(name=message["name"])

    queue.send({"name": "one"})
    queue.send({"name": "two"})
    outcome = kit.process_next(queue)
    assert outcome is not None
    assert outcome.handled
    assert effects() == ["one"]
    assert len(kit.drain()) == 1
    assert effects() == ["one", "two"]
    kit.assert_empty(queue)
    kit.assert_handled(note, times=2)
    kit.assert_handled(queue, times=2)
    kit.assert_handled("note", times=2)
    assert kit.process_next(queue) is None


@pytest.mark.parametrize("queue", [Leased, Transactional])
def test_a_failure_is_judged_as_in_a_worker(kit: Kit, queue: type[Queue]) -> None:
    attempts = []

    @consumer(queue, attempts=3, immediate_retries=1, retry_delay=60)
    def fail(message: dict, context: Context) -> None:
        attempts.append(context.attempt)
        raise ValueError("no")

    queue.send({})
    outcomes = kit.drain()
    assert [outcome.verdict for outcome in outcomes] == [RetryNow(), RetryLater(timedelta(seconds=60))]
    assert isinstance(outcomes[0].error, ValueError)
    assert kit.process_next(queue) is None
    kit.advance(timedelta(seconds=30))
    assert kit.process_next(queue) is None
    kit.advance(timedelta(seconds=31))
    outcome = kit.process_next(queue)
    assert outcome is not None
    assert outcome.poisoned
    assert attempts == [1, 2, 3]
    kit.assert_retried(fail, times=2)
    kit.assert_poisoned(fail, times=1, reason="failed 3 of 3")
    [row] = kit.poison(queue)
    assert (row.attempts, row.exception_type) == (3, "ValueError")
    kit.assert_empty(queue)


def test_an_at_most_once_message_is_poison_at_its_first_failure(kit: Kit) -> None:
    @consumer(AtMostOnce)
    def fail(message: dict) -> None:
        raise ValueError("no")

    AtMostOnce.send({})
    [outcome] = kit.drain()
    assert isinstance(outcome.verdict, Poison)
    kit.assert_poisoned(AtMostOnce, reason="at-most-once")


def test_a_policy_is_asked(kit: Kit) -> None:
    @consumer(Leased, policy=lambda failure: Discard("who cares"))
    def fail(message: dict) -> None:
        raise ValueError("no")

    Leased.send({})
    kit.drain()
    kit.assert_discarded(fail, times=1)


def test_what_a_transactional_handler_wrote_and_sent_is_undone_with_its_failure(kit: Kit) -> None:
    @consumer(Transactional, attempts=1)
    def fail(message: dict) -> None:
        Effect.objects.create(name="written")
        Leased.send({"sent": True})
        raise ValueError("no")

    Transactional.send({})
    kit.drain()
    assert effects() == []
    kit.assert_not_sent(Leased)


def test_what_a_leased_handler_wrote_before_it_failed_stays_as_in_autocommit(kit: Kit) -> None:
    @consumer(Leased, attempts=1)
    def fail(message: dict) -> None:
        Effect.objects.create(name="written")
        with transaction.atomic():
            Effect.objects.create(name="undone")
            raise ValueError("no")

    Leased.send({})
    kit.drain()
    assert effects() == ["written"]


@pytest.mark.parametrize("queue", SEMANTICS)
def test_a_database_error_of_a_handler_does_not_break_the_test(kit: Kit, queue: type[Queue]) -> None:
    @consumer(queue, attempts=1)
    def fail(message: dict) -> None:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1 FROM no_such_table")

    queue.send({})
    kit.drain()
    kit.assert_poisoned(queue, times=1)
    assert effects() == []
    assert PoisonMessage.objects.count() == 1


@pytest.mark.django_db
@pytest.mark.parametrize("queue", SEMANTICS)
def test_an_integrity_error_leaves_the_tests_own_rows(queue_kit: Kit, queue: type[Queue]) -> None:
    before = Effect.objects.create(name="before")

    @consumer(queue, attempts=1)
    def fail(message: dict) -> None:
        Effect.objects.create(pk=before.pk, name="again")

    queue.send({})
    [outcome] = queue_kit.drain()
    assert isinstance(outcome.error, IntegrityError)
    assert effects() == ["before"]


@pytest.mark.parametrize("queue", [Leased, Transactional])
def test_what_is_to_happen_after_the_commit_happens_when_a_message_is_ended(kit: Kit, queue: type[Queue]) -> None:
    happened = []

    @consumer(queue, attempts=1)
    def later(message: dict) -> None:
        with transaction.atomic():
            transaction.on_commit(lambda: happened.append(message["n"]))
            if message["n"] == 2:
                raise ValueError("no")

    for n in (1, 2, 3):
        queue.send({"n": n})
    kit.drain()
    assert happened == [1, 3]


@pytest.mark.django_db
def test_what_the_test_itself_has_for_after_its_commit_is_left_alone(queue_kit: Kit) -> None:
    happened = []
    transaction.on_commit(lambda: happened.append("the test's"))
    first = connection.run_on_commit[:]
    register(Transactional, lambda message: None)
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")
    Transactional.send({})
    queue_kit.drain()
    assert happened == []
    assert connection.run_on_commit[: len(first)] == first
    assert not any("Changes" in type(wrapper).__name__ for wrapper in connection.execute_wrappers)


def test_messages_that_no_consumer_takes_are_passed_over(kit: Kit) -> None:
    @consumer(Leased)
    def ship(message: Shipped) -> None:
        Effect.objects.create(name=str(message.order))

    Leased.send({"unknown": 1})
    Leased.send({"unknown": 2})
    Leased.send(Shipped(7))
    assert [item.consumer.rpartition(".")[2] for item in kit.drain()] == ["ship"]
    assert effects() == ["7"]
    assert len(kit.sent(Leased)) == 3


def test_a_message_for_several_consumers_is_handled_by_each(kit: Kit) -> None:
    for name in ("first", "second"):
        register(Addressed, lambda message: Effect.objects.create(name="x"), name=name)
    Addressed.send({})
    outcomes = kit.drain()
    assert sorted(outcome.consumer for outcome in outcomes) == ["first", "second"]
    kit.assert_sent(Addressed, {}, times=2)


def test_a_message_that_names_no_recipient_is_copied_and_each_copy_handled(kit: Kit) -> None:
    Addressed.send({})
    for name in ("first", "second"):
        register(Addressed, lambda message: None, name=name)
    assert sorted(item.consumer for item in kit.drain()) == ["first", "second"]


@pytest.mark.parametrize("queue", [Urgent, InTurns, CappedOnce, Fenced])
def test_queues_of_every_kind_are_drained(kit: Kit, queue: type[Queue]) -> None:
    register(queue, lambda message: Effect.objects.create(name=str(message["n"])))
    for n in range(3):
        queue.send({"n": n}, **({"is_barrier": True} if queue is Fenced and n == 1 else {}))
    kit.drain(queue)
    assert sorted(effects()) == ["0", "1", "2"]
    kit.assert_empty(queue)
    assert not Subscriber.objects.exists()


def test_the_highest_priority_comes_first(kit: Kit) -> None:
    register(Urgent, lambda message: Effect.objects.create(name=message["name"]))
    Urgent.send({"name": "low"})
    Urgent.send({"name": "high"}, priority=2)
    kit.drain()
    assert effects() == ["high", "low"]


@pytest.mark.parametrize("queue", SEMANTICS)
def test_an_async_handler_writes_in_the_tests_transaction(kit: Kit, queue: type[Queue]) -> None:
    @consumer(queue)
    async def note(message: dict, context: Context) -> None:
        await asyncio.sleep(0)
        await Effect.objects.acreate(name="async")
        await Leased.asend({"from": "async"})

    queue.send({})
    assert kit.process_next(queue) is not None
    assert effects() == ["async"]
    kit.assert_sent(Leased, {"from": "async"})


@pytest.mark.parametrize("queue", [Leased, Transactional])
def test_time_limits_hold(kit: Kit, queue: type[Queue]) -> None:
    @consumer(queue, timeout=0.05, attempts=1)
    def hang(message: dict) -> None:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            pass

    queue.send({})
    kit.drain()
    kit.assert_poisoned(hang, reason="TimeLimitExceeded")


def test_delayed_messages_become_due_when_time_passes(kit: Kit) -> None:
    register(Leased, lambda message: None)
    Leased.send({"n": 1}, delay=timedelta(minutes=5))
    assert kit.drain() == []
    assert kit.assert_sent(Leased, {"n": 1}).delayed
    kit.advance(timedelta(minutes=6))
    assert len(kit.drain()) == 1


def test_leases_and_messages_expire_when_time_passes(kit: Kit) -> None:
    register(Leased, lambda message: None)
    Leased.send({"n": 1})
    batch = Leased.receive(1)
    batch.__enter__()  # a script that never ends what it took
    Leased.send({"n": 2}, expires_in=timedelta(seconds=20))
    kit.advance(timedelta(minutes=1))
    assert [message.body for message in kit.drain()] == [b'{"n":1}']
    register(Short, lambda message: None)
    Short.send({})
    kit.advance(timedelta(minutes=1))
    assert kit.drain(Short) == []


@pytest.mark.parametrize("period", [timedelta(0), timedelta(seconds=-1), 5])
def test_time_does_not_run_backwards(kit: Kit, period: Any) -> None:
    with pytest.raises(ValueError, match="timedelta above 0"):
        kit.advance(period)


def test_captured_is_what_was_sent_in_the_block_and_not_rolled_back(kit: Kit) -> None:
    register(Leased, lambda message: Transactional.send({"followed": message["n"]}))
    Leased.send({"n": 0})
    with kit.capture() as sent:
        Leased.send_many([{"n": 1}, {"n": 2}])
        with transaction.atomic():
            Leased.send({"n": 3})
            transaction.set_rollback(True)
        kit.process_next(Leased)
    assert sorted(str(message.body) for message in sent) == ["{'followed': 0}", "{'n': 1}", "{'n': 2}"]


def test_assertions_state_what_there_was(kit: Kit) -> None:
    register(Leased, lambda message: None, name="a.consumer")
    Leased.send(Shipped(7))
    kit.assert_sent(Leased, Shipped)
    kit.assert_sent(Leased, Shipped(7), times=1)
    kit.assert_sent(Leased, lambda sent: isinstance(sent, Sent) and sent.body["order"] == 7)
    kit.assert_not_sent(Leased, Shipped(8))
    for wrong in (
        lambda: kit.assert_sent(Leased, Shipped(8)),
        lambda: kit.assert_sent(Leased, times=2),
        lambda: kit.assert_not_sent(Leased),
        lambda: kit.assert_empty(),
    ):
        with pytest.raises(AssertionError, match=r"Shipped .*\"order\":7"):
            wrong()
    with pytest.raises(AssertionError, match=r"to be handled\. Outcomes: nothing"):
        kit.assert_handled(Leased)
    with pytest.raises(AssertionError, match="is neither a consumer"):
        kit.assert_handled(len)


def test_a_handler_that_sends_to_itself_for_ever_is_reported(kit: Kit) -> None:
    register(Leased, lambda message: Leased.send(message))
    Leased.send({})
    with pytest.raises(AssertionError, match="20 messages were handled and more are waiting"):
        kit.drain(limit=20)


def test_a_handler_cannot_handle_others_inside_of_itself(kit: Kit) -> None:
    register(Leased, lambda message: kit.process_next(Leased), attempts=1)
    Leased.send({})
    Leased.send({})
    assert isinstance(kit.drain()[0].error, QueueError)


@pytest.mark.django_db(transaction=True)
def test_a_handler_that_ends_the_callers_transaction_is_named(queue_kit: Kit) -> None:
    register(Leased, lambda message: connection.close())
    Leased.send({})
    with pytest.raises(QueueError, match="was closed while the handler ran"), transaction.atomic():
        queue_kit.drain()
    connection.connect()


@pytest.mark.parametrize(
    "alias", [pytest.param(alias, marks=marks_of(alias), id=kind) for kind, alias in DATABASES.items()]
)
@pytest.mark.parametrize("queue", SEMANTICS)
def test_the_kit_works_on_every_database(alias: str, queue: type[Queue]) -> None:
    kit = Kit()
    register(queue, lambda message: None, attempts=1)
    queue.send({"n": 1}, using=alias)
    queue.send({"n": 2}, using=alias, delay=timedelta(hours=1))
    outcome = kit.process_next(queue, using=alias)
    assert outcome is not None
    assert outcome.handled
    kit.advance(timedelta(hours=2))
    outcome = kit.process_next(queue, using=alias)
    assert outcome is not None
    assert outcome.handled
    assert kit.process_next(queue, using=alias) is None
    kit.close()


@pytest.mark.django_db
@pytest.mark.parametrize(
    "check",
    [
        lambda kit: kit.assert_sent(Leased), lambda kit: kit.assert_handled(Leased), lambda kit: kit.assert_retried(Leased),  # noqa: E501
        lambda kit: kit.assert_poisoned(Leased), lambda kit: kit.assert_discarded(Leased), lambda kit: kit.assert_handled(7),  # noqa: E501
    ],
)  # fmt: skip
def test_a_failed_assertion_points_at_the_test_and_not_into_the_kit(check: Any) -> None:
    """pytest leaves out of a traceback the frames that say ``__tracebackhide__``."""
    kit = Kit()
    try:
        with pytest.raises(AssertionError) as raised:
            check(kit)
    finally:
        kit.close()
    inside = [item for item in raised.traceback if item.path.name == "kit.py"]
    assert inside
    assert all(item.frame.f_locals.get("__tracebackhide__") for item in inside)


@pytest.mark.django_db
def test_a_schedule_is_run_once_as_if_it_were_due(queue_kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(declarations, "declared", {})
    Leased.schedule(Shipped(7), name="each night", cron="0 3 * * *", timezone="Europe/Oslo")

    identity = queue_kit.run_schedule("each night")

    sent = queue_kit.assert_sent(Leased, lambda sent: sent.headers["schedule"] == "each night", times=1)
    assert sent.message_id == identity
    assert sent.message_type == f"{__name__}.Shipped"
    with pytest.raises(LookupError, match="each day"):
        queue_kit.run_schedule("each day")
