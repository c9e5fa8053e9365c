"""Checkpoints: what an attempt has kept is given to the next, whatever ended the first."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from django.db import connections, transaction

from queueapp import Context, InvalidMessage, LeaseLost, Poison, PublishTo, Queue, RetryLater, consumer, messages
from queueapp.consuming.registry import registered
from queueapp.encryption import keyring
from queueapp.errors import NoCheckpoint
from queueapp.failures.poison_operations import requeue
from queueapp.messages.checkpoints import MAX_CHECKPOINT, read_checkpoint, take_checkpoint, with_checkpoint
from queueapp.models import DelayedMessage, PoisonMessage
from queueapp.testing import Kit
from tests.databases import DATABASES, marks_of
from tests.in_process_worker import Worker, eventually
from tests.testapp.models import Addressed, AtMostOnce, Effect, Leased, SecretExpiring, Transactional

on_every_database = pytest.mark.parametrize(
    "alias", [pytest.param(alias, marks=marks_of(alias), id=kind) for kind, alias in DATABASES.items()]
)


@pytest.fixture(autouse=True)
def no_consumers(no_consumers: None) -> None:
    """Only the consumers that the test registers."""


@pytest.fixture
def kit() -> Iterator[Kit]:
    kit = Kit()
    yield kit
    kit.close()


@on_every_database
def test_the_next_attempt_goes_on_where_the_last_one_was(alias: str, kit: Kit) -> None:
    begun = []

    @consumer(Leased, attempts=5, retry_delay=0)
    def work(message: dict, context: Context) -> None:
        first = (context.checkpointed or {"done": 0})["done"]
        begun.append((context.attempt, first))
        for n in range(first, 10):
            with transaction.atomic(using=alias):
                Effect.objects.using(alias).create(name=str(n))
                context.checkpoint({"done": n + 1})
            if n == 3 * context.attempt:
                raise ValueError("cut off")

    Leased.send({}, using=alias, headers={"own": "header"})
    for _ in range(4):
        outcome = kit.process_next(Leased, using=alias)
    assert outcome is not None
    assert outcome.handled
    assert outcome.headers["own"] == "header"
    assert begun == [(1, 0), (2, 4), (3, 7), (4, 10)]
    assert list(Effect.objects.using(alias).order_by("pk").values_list("name", flat=True)) == [
        str(n) for n in range(10)
    ]
    assert not Leased.objects.using(alias).exists()


@on_every_database
def test_it_is_kept_in_the_handlers_transaction(alias: str, kit: Kit) -> None:
    given = []

    @consumer(Leased, attempts=3, retry_delay=0)
    def work(message: dict, context: Context) -> None:
        given.append(context.checkpointed)
        with transaction.atomic(using=alias):
            context.checkpoint(context.attempt)
            if context.attempt == 2:
                raise ValueError("rolled back")
        assert context.checkpointed == (given[-1])  # the same all through an attempt
        if context.attempt < 3:
            raise ValueError("committed")

    Leased.send({}, using=alias)
    for _ in range(3):
        kit.process_next(Leased, using=alias)
    assert given == [None, 1, 1]


@pytest.mark.django_db
def test_it_survives_the_delayed_store_and_poison_and_is_not_among_the_headers(kit: Kit) -> None:
    given: list[Any] = []
    mended = False

    @consumer(Leased, attempts=2, retry_delay=60)
    async def work(message: dict, context: Context) -> None:
        given.append(context.checkpointed)
        assert "queueapp.Checkpoint" not in context.headers
        await asyncio.sleep(0)
        await context.acheckpoint({"attempt": context.attempt})
        if not mended:
            raise ValueError("no")

    Leased.send({})
    [outcome] = kit.drain()
    assert isinstance(outcome.verdict, RetryLater)
    assert "queueapp.Checkpoint" in DelayedMessage.objects.get().headers
    kit.advance(timedelta(seconds=61))
    [outcome] = kit.drain()
    assert isinstance(outcome.verdict, Poison)
    mended = True
    requeue(PoisonMessage.objects.all())
    [outcome] = kit.drain()
    assert outcome.handled
    assert given == [None, {"attempt": 1}, {"attempt": 2}]


@pytest.mark.django_db
def test_checkpoint_survives_a_lost_worker_and_works_in_scripts(kit: Kit) -> None:
    given = []
    Leased.send({})
    batch = Leased.receive(1)
    batch.__enter__()
    [message] = batch
    assert message.checkpointed is None
    message.checkpoint([1, 2])
    kit.advance(timedelta(minutes=1))  # its process is gone

    @consumer(Leased)
    def work(message: dict, context: Context) -> None:
        given.append((context.checkpointed, context.attempt))
        context.checkpoint("later")
        raise ValueError("no")

    kit.drain()
    assert given == [([1, 2], 2)]
    with pytest.raises(LeaseLost):
        message.checkpoint("stale")
    kit.advance(timedelta(minutes=1))
    with Leased.receive(1) as again:
        [message] = again
        assert message.checkpointed == "later"
        assert "queueapp.Checkpoint" not in message.headers
        message.checkpoint(None)
        message.ack()


@pytest.mark.django_db
def test_none_takes_it_away(kit: Kit) -> None:
    given = []

    @consumer(Leased, attempts=3, immediate_retries=3)
    def work(message: dict, context: Context) -> None:
        given.append(context.checkpointed)
        context.checkpoint("x" if context.attempt == 1 else None)
        if context.attempt < 3:
            raise ValueError("no")

    Leased.send({}, headers={"a": "b"})
    kit.drain()
    assert given == [None, "x", None]
    assert dict(kit.outcomes[-1].headers) == {"a": "b", "content-type": "application/json"}


@on_every_database
def test_a_handler_whose_lease_is_lost_keeps_nothing_and_its_rows_go_with_it(alias: str, kit: Kit) -> None:
    @consumer(Leased, attempts=1)
    def slow(message: dict, context: Context) -> None:
        Leased.objects.using(alias).update(lease_token=context.message_id)  # another worker has it by now
        with transaction.atomic(using=alias):
            Effect.objects.using(alias).create(name="x")
            context.checkpoint(1)

    Leased.send({}, using=alias)
    outcome = kit.process_next(Leased, using=alias)
    assert outcome is not None
    assert isinstance(outcome.error, LeaseLost)
    assert not Effect.objects.using(alias).exists()


class Unfit:
    pass


class Recursive(msgspec.Struct):
    x: float


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("value", "said"),
    [
        (Unfit(), "Unfit cannot be a checkpoint"),
        (float("nan"), "holds nan"),
        (Recursive(float("inf")), "holds inf"),
        ("x" * MAX_CHECKPOINT, "at most 65536 bytes"),
    ],
    ids=["no JSON", "NaN", "infinite", "too long"],
)
def test_what_cannot_be_kept_is_refused(kit: Kit, value: Any, said: str) -> None:
    @consumer(Leased, attempts=1)
    def work(message: dict, context: Context) -> None:
        context.checkpoint("before")
        context.checkpoint(value)

    Leased.send({})
    [outcome] = kit.drain()
    assert isinstance(outcome.error, InvalidMessage)
    assert said in str(outcome.error)
    [row] = kit.poison(Leased)
    assert "before" in row.headers


@pytest.mark.django_db
@pytest.mark.parametrize("queue", [Transactional, AtMostOnce])
def test_without_a_lease_a_checkpoint_is_refused(kit: Kit, queue: type[Queue]) -> None:
    consumer(queue, attempts=1)(lambda message, context: context.checkpoint(1))
    queue.send({})
    [outcome] = kit.drain()
    assert isinstance(outcome.error, NoCheckpoint)
    queue.send({})
    with queue.receive(1) as batch:
        [message] = batch
        with pytest.raises(NoCheckpoint, match=r"Use AT_LEAST_ONCE"):
            message.checkpoint(1)
        message.ack()


@pytest.mark.django_db
def test_each_copy_of_a_message_has_its_own(kit: Kit) -> None:
    given = {}

    def work(message: dict, context: Context) -> None:
        given[context.consumer.name, context.attempt] = context.checkpointed
        context.checkpoint(context.consumer.name)
        if context.attempt == 1:
            raise ValueError("no")

    for name in ("a", "b"):
        consumer(Addressed, name=name, immediate_retries=1)(work)
    Addressed.send({})
    kit.drain()
    assert given == {("a", 1): None, ("a", 2): "a", ("b", 1): None, ("b", 2): "b"}


@pytest.mark.django_db
def test_what_is_published_of_a_message_that_was_given_up_has_none(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    from queueapp.models import Delivery

    given = Leased.delivery.given | {"max_deliveries": 1, "on_expired": PublishTo("Transactional")}
    monkeypatch.setattr(Leased, "delivery", Delivery(given, ""))

    @consumer(Leased, immediate_retries=5)
    def work(message: dict, context: Context) -> None:
        context.checkpoint("mine")
        raise ValueError("no")

    Leased.send({})
    kit.drain(Leased)
    assert [set(message.headers) & {"queueapp.Checkpoint"} for message in kit.sent(Transactional)] == [set()]


@on_every_database
def test_leases_are_renewed_around_a_transaction_that_keeps_one(alias: str) -> None:
    """A row that its own handler has locked is passed over, and renewed when the handler releases the lock."""
    given = []

    @consumer(Leased, timeout=60)
    def work(message: dict, context: Context) -> None:
        given.append(context.checkpointed)
        with transaction.atomic(using=alias):
            context.checkpoint("half")
            until = time.monotonic() + 1.5
            while time.monotonic() < until:
                pass

    Leased.send({}, using=alias)
    worker = Worker(Leased, alias, concurrency=1).start()
    try:
        eventually(lambda: worker.pump.stats.handled == 1)
    finally:
        worker.stop()
        connections[alias].close()
    assert given == [None]
    assert worker.pump.stats.lost == 0
    assert not Leased.objects.using(alias).exists()


@pytest.mark.django_db
def test_a_handler_that_keeps_none_changes_its_row_no_more_than_before(kit: Kit) -> None:
    """What it costs, in row versions of the queue's table: a lease is one, a checkpoint one more."""

    def updates() -> int:
        with connections["default"].cursor() as cursor:
            cursor.execute("SELECT pg_stat_get_xact_tuples_updated(%s::regclass)", [Leased._meta.db_table])
            return int(cursor.fetchone()[0])

    if connections["default"].vendor != "postgresql":
        pytest.skip("PostgreSQL counts row versions of a transaction")
    counted = {}
    for name, handler in (
        ("no context", lambda message: None),
        ("context", lambda message, context: context.checkpointed and None),
        ("checkpoint", lambda message, context: context.checkpoint(1)),
    ):
        consumer(Leased, name=name)(handler)
        before = updates()
        Leased.send_many([{}] * 5)
        kit.drain()
        counted[name] = updates() - before
        registered.remove(name)
    assert counted == {"no context": 5, "context": 5, "checkpoint": 10}


@pytest.mark.django_db
def test_the_checkpoint_of_an_encrypted_message_is_sealed_with_its_body(kit: Kit, settings: Any) -> None:
    settings.QUEUEAPP = {"KEYRING": lambda: {"only": b"0123456789abcdefghijklmnopqrstuv"}}
    keyring.forget()
    seen = []

    @consumer(SecretExpiring, attempts=3, retry_delay=0)
    def work(message: dict, context: Context) -> None:
        seen.append(context.checkpointed)
        if context.checkpointed is None:
            with transaction.atomic():
                context.checkpoint({"iban": "DE89370400440532013000"})
            raise ValueError("once more")

    for headers in ({}, {"encrypt-for": "customer 7"}):
        seen.clear()
        SecretExpiring.send({"amount": 1}, headers=headers)
        assert kit.process_next(SecretExpiring).retried  # type: ignore[union-attr]
        stored = SecretExpiring.objects.get().headers
        assert "queueapp.Checkpoint" in stored
        assert "iban" not in stored
        assert "DE89" not in stored
        assert kit.process_next(SecretExpiring).handled  # type: ignore[union-attr]
        assert seen == [None, {"iban": "DE89370400440532013000"}]
    keyring.forget()


def test_a_sealed_checkpoint_opens_for_its_own_message_alone(settings: Any) -> None:
    settings.QUEUEAPP = {"KEYRING": lambda: {"new": b"0123456789abcdefghijklmnopqrstuv", "old": b"b" * 32}}
    keyring.forget()
    own_value, another = messages.new_id(), messages.new_id()
    headers = {"content-type": "application/json+aes256gcm", "encryption-key": "old"}
    stored = messages.decode_headers(with_checkpoint(messages.encode_headers(headers), [1], own_value, "default"))
    assert {name: stored[name] for name in headers} == headers, "the body still needs its own key"
    text = take_checkpoint(stored)
    assert read_checkpoint(text, own_value, "default") == [1]
    assert read_checkpoint(text, another, "default") is None
    assert read_checkpoint(f"{text}x", own_value, "default") is None
    keyring.forget()
