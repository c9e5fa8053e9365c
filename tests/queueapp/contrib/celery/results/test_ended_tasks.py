"""A message that the transport discards has a result: callers of get(), chains and chords do not wait for ever."""

from __future__ import annotations

import io
import uuid
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import kombu
import pytest
from celery import Celery, chain, chord, states
from celery.exceptions import ChordError, Reject, TaskRevokedError, WorkerLostError
from django.core.management import call_command
from django.db import transaction

from queueapp import delayed
from queueapp.contrib.celery import ended_tasks, topology
from queueapp.contrib.celery.models import BrokerQueue, CeleryChordPart, DeclaredQueue
from queueapp.contrib.celery.process_agent import stop_agents
from queueapp.messages import TYPE, decode_headers
from queueapp.models import DelayedMessage, Now, PoisonMessage
from queueapp.operations import control, subscriptions
from queueapp.services.maintenance import purge_expired
from tests.databases import only_on_postgresql

QUEUE = "results"


@pytest.fixture
def app(app: Celery, alias: str) -> Iterator[Celery]:
    """The app of results, with this broker and two tasks."""
    app.conf.broker_url = f"queueapp://{alias}"
    app.conf.broker_transport_options = {"max_deliveries": 1}

    @app.task(name="shop.add", shared=False)
    def add(*numbers: int) -> int:
        return sum(numbers)

    @app.task(name="shop.total", shared=False)
    def total(numbers: list[int]) -> int:
        return sum(numbers)

    @app.task(name="shop.failed", shared=False)
    def failed(task_id: str) -> None: ...

    ended_tasks.use(app)
    yield app
    ended_tasks.use(None)
    stop_agents()
    for model in (BrokerQueue, DelayedMessage, PoisonMessage, DeclaredQueue):
        model.objects.using(alias).all().delete()


def names(alias: str) -> list[str]:
    """The tasks that wait in the broker."""
    rows = BrokerQueue.objects.using(alias).order_by("seq")
    return [decode_headers(row.headers)[TYPE] for row in rows]


def expire(alias: str) -> None:
    BrokerQueue.objects.using(alias).update(expires=Now() - timedelta(seconds=1))
    purge_expired(BrokerQueue, alias)


def purge(alias: str) -> None:
    topology.purge(alias, QUEUE)


def purge_by_operator(alias: str) -> None:
    control.purge(BrokerQueue, using=alias)


def delete_by_operator(alias: str) -> None:
    control.delete(BrokerQueue, list(BrokerQueue.objects.using(alias).values_list("pk", flat=True)), using=alias)


def move_to_poison_by_operator(alias: str) -> None:
    seqs = list(BrokerQueue.objects.using(alias).values_list("pk", flat=True))
    control.move_to_poison(BrokerQueue, seqs, reason="it is a pill", using=alias)


def delete_queue(alias: str) -> None:
    topology.delete(alias, QUEUE)


def expire_queue(alias: str) -> None:
    over = Now() - timedelta(seconds=1)
    DeclaredQueue.objects.using(alias).update_or_create(name=QUEUE, defaults={"expires_at": over})
    topology.delete_expired(alias)


def purge_copies(alias: str) -> None:
    subscriptions.purge_copies(BrokerQueue, QUEUE, using=alias)


REMOVALS = [
    expire, purge, purge_by_operator, delete_by_operator, move_to_poison_by_operator, delete_queue, expire_queue,
    purge_copies,
]  # fmt: skip


@pytest.mark.parametrize("remove", REMOVALS)
def test_a_task_whose_message_is_removed_is_revoked(app: Celery, alias: str, remove: Any) -> None:
    result = app.tasks["shop.add"].delay(1)

    remove(alias)

    assert names(alias) == []
    assert result.status == states.REVOKED
    with pytest.raises(TaskRevokedError):
        result.get(timeout=5)


@only_on_postgresql
def test_a_task_that_is_purged_by_the_command_is_revoked(app: Celery, alias: str) -> None:
    result = app.tasks["shop.add"].delay(1)

    call_command("purgequeue", BrokerQueue._meta.label, "--yes", stdout=io.StringIO())

    assert (names(alias), result.status) == ([], states.REVOKED)


@pytest.mark.parametrize("remove", [purge, purge_copies])
def test_a_delayed_task_that_is_purged_is_revoked(app: Celery, alias: str, remove: Any) -> None:
    result = app.tasks["shop.add"].apply_async([1], countdown=600)

    remove(alias)

    assert not DelayedMessage.objects.using(alias).exists()

    assert result.status == states.REVOKED


def test_a_delayed_task_that_is_cancelled_is_revoked_and_others_stay(app: Celery, alias: str) -> None:
    result, kept = (app.tasks["shop.add"].apply_async([1], countdown=600) for _ in range(2))

    assert delayed.cancel(uuid.UUID(result.id), using=alias) == 1

    assert (result.status, kept.status) == (states.REVOKED, states.PENDING)
    assert DelayedMessage.objects.using(alias).count() == 1


def test_a_rollback_takes_the_result_with_it(app: Celery, alias: str) -> None:
    result = app.tasks["shop.add"].delay(1)

    with transaction.atomic(using=alias):
        topology.delete(alias, QUEUE)
        transaction.set_rollback(True, using=alias)

    assert (result.status, names(alias)) == (states.PENDING, ["shop.add"])


def test_a_message_in_flight_is_left_to_its_worker(app: Celery, alias: str) -> None:
    result = app.tasks["shop.add"].delay(1)
    with app.connection() as conn, conn.channel() as channel:
        message = channel.basic_get(QUEUE)
        assert message is not None
        topology.delete(alias, QUEUE)

        assert result.status == states.PENDING


def _spent(app: Celery) -> None:
    """A message that was delivered as often as it may be, and never acked."""
    with app.connection() as conn:
        BrokerQueue.objects.using(conn.transport.alias).update(deliveries=1)
        assert conn.channel().basic_get(QUEUE) is None


def _rejected(app: Celery) -> None:
    with app.connection() as conn:
        conn.channel().basic_get(QUEUE).reject()


def _process_died(app: Celery) -> None:
    with app.connection() as conn:
        message = conn.channel().basic_get(QUEUE)
        message.process_died = True
        message.reject(requeue=True)  # reject_on_worker_lost


@pytest.mark.parametrize("discard", [_spent, _rejected, _process_died])
def test_a_task_whose_message_becomes_poison_has_failed(app: Celery, alias: str, discard: Any) -> None:
    result = app.tasks["shop.add"].apply_async([1], link_error=app.tasks["shop.failed"].s())

    discard(app)

    reason = PoisonMessage.objects.using(alias).get().reason
    assert (result.status, str(result.result)) == (states.FAILURE, reason)
    assert isinstance(result.result, WorkerLostError) == (discard is not _rejected)
    assert names(alias) == ["shop.failed"], "its error callback is sent"


def test_a_result_that_the_task_has_stored_stays(app: Celery, alias: str) -> None:
    result = app.tasks["shop.add"].delay(1)
    app.backend.store_result(result.id, Reject("as the task has it"), states.FAILURE)

    _rejected(app)

    assert str(result.result) != PoisonMessage.objects.using(alias).get().reason


def test_a_chain_fails_with_its_first_task(app: Celery, alias: str) -> None:
    add = app.tasks["shop.add"]
    result = chain(add.s(1), add.s(2))()

    purge(alias)

    with pytest.raises(TaskRevokedError):
        result.get(timeout=5)


@pytest.mark.parametrize("remove", [expire, delete_queue])
def test_a_chord_fails_with_its_last_member(app: Celery, alias: str, remove: Any) -> None:
    add, total = app.tasks["shop.add"], app.tasks["shop.total"]
    result = chord([add.s(1), add.s(2)])(total.s())

    remove(alias)

    with pytest.raises((ChordError, TaskRevokedError)):
        result.get(timeout=5)
    assert result.status == states.FAILURE
    assert not CeleryChordPart.objects.using(alias).exists()


def test_a_chord_with_a_chain_fails_with_the_chain(app: Celery, alias: str) -> None:
    add, total = app.tasks["shop.add"], app.tasks["shop.total"]
    result = chord([chain(add.s(1), add.s(2)), chain(add.s(3), add.s(4))])(total.s())

    purge(alias)

    with pytest.raises((ChordError, TaskRevokedError)):
        result.get(timeout=5)
    assert result.status == states.FAILURE


def test_messages_without_a_task_or_result_are_removed(app: Celery, alias: str) -> None:
    with kombu.Connection(f"queueapp://{alias}") as conn:
        conn.Producer().publish("x", routing_key=QUEUE)
        conn.Producer().publish("x", routing_key=QUEUE, headers={"task": "shop.add", "id": 5})
    BrokerQueue.objects.using(alias).create(recipient=QUEUE, headers="{")
    ignored = app.tasks["shop.add"].apply_async([1], ignore_result=True)

    assert topology.purge(alias, QUEUE) == 4
    assert ignored.status == states.PENDING
