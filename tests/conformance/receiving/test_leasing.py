"""Workers on queues whose leases never expire, or may be ended by others; and what they discard at a limit."""

from __future__ import annotations

import logging
import uuid
from datetime import timedelta
from typing import Any

import pytest
from django.db import connections

from queueapp import Context, Drop, Leasing, overrides, signals
from queueapp.failures import recoverability
from queueapp.models import Now, Subscriber
from queueapp.services.orphaned_leases import release_orphaned_leases
from queueapp.sql import queue_sql
from queueapp.sql.claims import FOREVER_MS, LAST_END, SeqRange
from tests.conformance.endpoint import Endpoint, Note, modes
from tests.conformance.gate import Gate
from tests.databases import statements_of
from tests.in_process_worker import eventually


@modes("R")
def test_lease_period_unset_should_never_expire_and_never_be_renewed(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint.queue.delivery, "lease_period", None)
    renewed: list[Any] = []
    statements = statements_of(connections[endpoint.alias], "acks")
    monkeypatch.setattr(statements, "renew", lambda self, connection, seqs, *rest: renewed.append(seqs) or seqs)
    gate = Gate()

    def act(message: Note, context: Context) -> None:
        context.extend(timedelta(seconds=1))
        gate.enter()

    endpoint.handle(act)
    endpoint.send_many(2)
    endpoint.start(concurrency=1)
    eventually(lambda: gate.inside == 1)
    # The messages behind it were released, so the renewal of leases has run for a while.
    eventually(lambda: endpoint.rows.filter(lease_token__isnull=True, deliveries=0).count() == 1)

    (held,) = endpoint.rows.filter(lease_token__isnull=False)
    assert held.lease_expires > LAST_END
    assert renewed == []
    gate.let(2)
    endpoint.wait_until_empty()
    assert endpoint.numbers == [0, 1]


@modes("R")
def test_lease_period_unset_should_be_released_when_its_worker_is_dead(endpoint: Endpoint) -> None:
    endpoint.send(1)
    dead, connection = uuid.uuid4(), connections[endpoint.alias]
    sql = queue_sql(endpoint.queue, connection)
    assert len(sql.claims.claim_by_lease(connection, [SeqRange()], 5, uuid.uuid4(), dead, FOREVER_MS)) == 1
    assert sql.claims.peek(connection, [SeqRange()], [], 5).ahead == 0
    Subscriber.objects.using(endpoint.alias).create(
        pk=dead, queue=endpoint.queue._meta.label, table=endpoint.queue._meta.db_table, host="h", process=1,
        supervisor=1, alive_until=Now() - timedelta(minutes=1),
    )  # fmt: skip

    assert release_orphaned_leases(endpoint.alias) == 1
    assert sql.claims.peek(connection, [SeqRange()], [], 5).ahead == 1


@modes("R")
def test_lease_period_set_by_an_operator_should_hold_for_the_next_claim(endpoint: Endpoint) -> None:
    gate = Gate()
    endpoint.handle(gate.enter)
    endpoint.start(concurrency=1)
    # As the heartbeat of a process does, which this worker in a thread has not.
    overrides.load(endpoint.alias, {endpoint.queue._meta.label: {"lease_period": timedelta(hours=3)}})
    try:
        endpoint.send(1)
        eventually(lambda: gate.inside == 1)
        assert endpoint.rows.filter(lease_expires__gt=Now() + timedelta(hours=2)).exists()
    finally:
        overrides.load(endpoint.alias, {})
        overrides.forget()
        gate.let(1)
    endpoint.wait_until_empty()


@modes("R")
@pytest.mark.parametrize("leasing", [Leasing.STRICT, Leasing.SUBLET])
def test_leasing_should_be_silent_when_others_end_what_a_worker_holds(
    endpoint: Endpoint, leasing: Leasing, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(endpoint.queue.delivery, "leasing", leasing)
    gate = Gate()
    endpoint.handle(gate.enter)
    endpoint.send(1)
    worker = endpoint.start(concurrency=1)
    eventually(lambda: gate.inside == 1)
    held = endpoint.rows.get()

    assert endpoint.queue.ack(held.seq, client=uuid.uuid4(), using=endpoint.alias) == (leasing is Leasing.SUBLET)
    assert endpoint.queue.ack(held.seq, client=held.lease_owner, using=endpoint.alias) == (leasing is Leasing.STRICT)
    gate.let(1)
    worker.stop()

    assert endpoint.calls == [(1, 1)]
    assert worker.pump.stats.lost == 0
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


@modes("R")
@pytest.mark.parametrize("leasing", [Leasing.STRICT, Leasing.SUBLET, Leasing.FENCED])
def test_leasing_should_let_a_late_ack_of_a_worker_succeed_before_it_is_leased_anew(
    endpoint: Endpoint, leasing: Leasing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint.queue.delivery, "leasing", leasing)
    monkeypatch.setattr(endpoint.queue.delivery, "renew_leases", False)

    def act(message: Note, context: Context) -> None:
        endpoint.rows.update(lease_expires=Now() - timedelta(seconds=1))

    endpoint.handle(act)
    endpoint.send(1)
    worker = endpoint.start(concurrency=1)

    endpoint.wait_until_empty()
    assert endpoint.calls == [(1, 1)]
    assert worker.pump.stats.lost == 0


@modes("RS")
def test_max_deliveries_should_end_as_the_queue_wants(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[Any] = []
    receiver = lambda sender, reasons, ids, **kwargs: reported.append((reasons, ids))  # noqa: E731
    signals.expired.connect(receiver, sender=endpoint.queue)
    monkeypatch.setattr(endpoint.queue.delivery, "max_deliveries", 2)
    monkeypatch.setattr(endpoint.queue.delivery, "on_expired", Drop(reasons=("max_deliveries", "time_limit")))

    def act(message: Note, context: Context) -> None:
        raise ValueError

    endpoint.handle(act, policy=lambda failure: recoverability.RetryNow())
    identity = endpoint.send(1)
    endpoint.start()

    endpoint.wait_until_empty()
    eventually(lambda: reported == [(("max_deliveries",), [identity])])
    signals.expired.disconnect(receiver, sender=endpoint.queue)
    assert endpoint.calls == [(1, 1), (1, 2)]
    assert not endpoint.poison.exists()
