"""``deferred_ack_expiration``: an ack that comes before its message, which then never enters; and no pair is stuck."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from django.db import connections, transaction
from django.db.models import F

from queueapp import Leasing
from queueapp.messages import new_id
from queueapp.models import DeferredAck, Now
from queueapp.operations import expiration
from queueapp.operations.statistics import queue_stats
from queueapp.sql import queue_sql
from tests.databases import DATABASES, marks_of
from tests.in_process_worker import eventually
from tests.queueapp.sql.server import outgoing
from tests.testapp.leases import Deferring
from tests.testapp.models import Leased

PAIRS = 250


@pytest.fixture(params=[pytest.param(alias, id=kind, marks=marks_of(alias)) for kind, alias in DATABASES.items()])
def alias(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def kept(alias: str) -> Any:
    return DeferredAck.objects.using(alias)


def rows(alias: str) -> Any:
    return Deferring.objects.using(alias)


def test_deferred_ack_expiration(alias: str) -> None:
    early, late = new_id(), new_id()
    Deferring.send({"n": 1}, message_id=late, using=alias)

    assert Deferring.ack(ids=[early, late], using=alias) == 1
    message = kept(alias).annotate(left=F("expires") - Now()).get()
    assert (message.queue, message.message_id, message.kind) == (Deferring._meta.label, early, "ack")
    assert timedelta(minutes=59) < message.left <= timedelta(hours=1)
    assert Deferring.send({"n": 2}, message_id=early, using=alias) == early

    assert not rows(alias).exists(), "it never enters"
    assert not kept(alias).exists(), "and its ack is used up"
    Deferring.send({"n": 3}, message_id=early, using=alias)
    assert rows(alias).count() == 1


def test_a_deferred_expire_is_honoured_as_removal(alias: str) -> None:
    early = new_id()
    assert Deferring.expire(ids=[early], using=alias) == 0
    assert kept(alias).get().kind == "expire"
    Deferring.send({}, message_id=early, using=alias)
    assert not rows(alias).exists()


def test_a_deferred_ack_that_is_repeated_is_kept_anew(alias: str) -> None:
    early = new_id()
    Deferring.expire(ids=[early], using=alias)
    kept(alias).update(expires=Now() - timedelta(minutes=1))
    Deferring.ack(ids=[early], using=alias)
    assert kept(alias).filter(expires__gt=Now()).get().kind == "ack"


def test_a_deferred_cancel_is_dropped(alias: str) -> None:
    assert Deferring.cancel(10**9, using=alias) == 0
    assert not kept(alias).exists()


def test_a_deferred_ack_that_is_too_old_blocks_no_message(alias: str) -> None:
    early, second = new_id(), new_id()
    Deferring.ack(ids=[early, second], using=alias)
    kept(alias).update(expires=Now() - timedelta(seconds=1))
    Deferring.send({}, message_id=early, using=alias)

    assert rows(alias).count() == 1
    assert expiration.forget_old(alias) == 1
    assert not kept(alias).exists()


def test_a_bulk_send_leaves_out_what_was_acked(alias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [new_id() for _ in range(600)]
    acked = set(ids[::3])
    Deferring.ack(ids=acked, using=alias)
    following = iter(ids)
    monkeypatch.setattr(
        "queueapp.sending.bulk.messages.id_sequence",
        lambda: lambda count: [next(following).bytes for _ in range(count)],
    )

    assert Deferring.send_many(({"n": n} for n in range(600)), using=alias) == 400

    assert {row.id for row in rows(alias)} == set(ids) - acked
    assert not kept(alias).exists()


def test_a_send_that_is_rolled_back_leaves_the_ack(alias: str) -> None:
    early = new_id()
    Deferring.ack(ids=[early], using=alias)
    with transaction.atomic(using=alias):
        Deferring.send({}, message_id=early, using=alias)
        transaction.set_rollback(True, using=alias)
    assert kept(alias).count() == 1
    Deferring.send({}, message_id=early, using=alias)
    assert not rows(alias).exists()


def test_a_leased_message_is_not_taken_for_a_future_message(alias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Deferring.delivery, "leasing", Leasing.STRICT)
    identity = Deferring.send({}, using=alias)
    with Deferring.receive(using=alias) as batch:
        (message,) = batch
        assert Deferring.ack(ids=[identity], using=alias) == 0
        assert not kept(alias).exists()
        message.ack()


def test_messages_of_another_path_are_removed_by_maintenance(alias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expiration, "BATCH", 2)
    ids = [new_id() for _ in range(5)]
    Deferring.ack(ids=ids, using=alias)
    connection = connections[alias]
    for identity in ids[1:4]:
        queue_sql(Deferring, connection).inserts.insert(connection, outgoing(id=identity))
    with Deferring.receive(using=alias) as batch:
        (held,) = batch
        removed, after = 0, 0
        for _ in range(3):
            gone, after = expiration.settle(Deferring, alias, after)
            removed += gone
        assert (removed, after) == (2, 0)
        assert [row.id for row in rows(alias)] == [held.id], "leased messages are left to their owner"
    assert {message.message_id for message in kept(alias)} == {ids[0], ids[4], held.id}

    removed, after = expiration.settle(Deferring, alias)
    assert removed + expiration.settle(Deferring, alias, after)[0] == 1
    assert not rows(alias).exists()


def test_deferred_ack_count(alias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("queueapp.operations.statistics.router.db_for_write", lambda queue: alias)
    Deferring.ack(ids=[new_id(), new_id()], using=alias)
    found = {stats.queue: stats.deferred_ack_count for stats in queue_stats([Deferring, Leased])}
    assert found[Deferring._meta.label] == 2
    assert found[Leased._meta.label] is None


# -- at the same time -------------------------------------------------------------------------------------------------


def race(alias: str, *parts: Callable[[uuid.UUID], None]) -> list[uuid.UUID]:
    """Let each part do its share of every pair at the same moment, on connections of their own."""
    ids, gate = [new_id() for _ in range(PAIRS)], threading.Barrier(len(parts), timeout=60)

    def run(part: Callable[[uuid.UUID], None]) -> None:
        try:
            for identity in ids:
                gate.wait()
                part(identity)
        except BaseException:
            gate.abort()
            raise
        finally:
            connections.close_all()

    with ThreadPoolExecutor(len(parts)) as pool:
        for done in [pool.submit(run, part) for part in parts]:
            done.result()
    return ids


def test_acks_and_sends_at_the_same_time_leave_nothing_behind(alias: str) -> None:
    race(
        alias,
        lambda identity: Deferring.send({}, message_id=identity, using=alias) and None,
        lambda identity: Deferring.ack(ids=[identity], using=alias) and None,
    )
    assert not rows(alias).exists(), "no message is left that was acked"
    assert not kept(alias).exists(), "no ack is left of a message that came"


def test_acks_and_bulk_sends_at_the_same_time_leave_nothing_behind(alias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row = threading.local()
    monkeypatch.setattr("queueapp.sending.bulk.messages.id_sequence", lambda: lambda count: [row.id.bytes] * count)

    def send(identity: uuid.UUID) -> None:
        row.id = identity
        Deferring.send_many([{}], using=alias)

    race(alias, send, lambda identity: Deferring.ack(ids=[identity], using=alias) and None)
    assert not rows(alias).exists()
    assert not kept(alias).exists()


def test_an_ack_waits_for_a_send_that_is_not_committed(alias: str) -> None:
    identity, sent, go_on = new_id(), threading.Event(), threading.Event()

    def send() -> None:
        with transaction.atomic(using=alias):
            Deferring.send({}, message_id=identity, using=alias)
            sent.set()
            go_on.wait(60)
        connections.close_all()

    def ack() -> int:
        try:
            return Deferring.ack(ids=[identity], using=alias)
        finally:
            connections.close_all()

    with ThreadPoolExecutor(2) as pool:
        sending = pool.submit(send)
        assert sent.wait(60)
        acking = pool.submit(ack)
        with pytest.raises(TimeoutError):
            acking.result(timeout=0.3)
        go_on.set()
        sending.result(60)
        assert acking.result(60) == 1
    eventually(lambda: not rows(alias).exists())
    assert not kept(alias).exists()
