"""What a peek counts, what it does not wait for, and how few receives go in vain after it."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
from django.db import connections, transaction

from queueapp.models import Now
from queueapp.sql import queue_sql
from queueapp.sql.claims import PeekResult, SeqRange
from tests.conformance.endpoint import Endpoint, modes
from tests.in_process_worker import DEADLINE, eventually
from workers.receiving.pump import QueuePump


def peek(endpoint: Endpoint, limit: int = 1000) -> int:
    connection = connections[endpoint.alias]
    return queue_sql(endpoint.queue, connection).claims.peek(connection, [SeqRange()], [], limit).ahead


def elsewhere(work: Any) -> Any:
    """Run on another thread, so on another connection; returns its result."""
    results: list[Any] = []

    def run() -> None:
        results.append(work())
        connections.close_all()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(DEADLINE)
    assert results, "it is still waiting"
    return results[0]


@modes("NRS")
def test_when_peeking_should_count_what_is_available(endpoint: Endpoint) -> None:
    assert peek(endpoint) == 0
    endpoint.send_many(5)

    assert peek(endpoint) == 5


@modes("NRS")
def test_when_peeking_should_count_at_most_the_limit(endpoint: Endpoint) -> None:
    endpoint.send_many(50)

    assert peek(endpoint, limit=10) == 10


@modes("NRS")
def test_when_receive_takes_long_to_complete_should_not_count_it(endpoint: Endpoint) -> None:
    endpoint.send_many(2)
    connection = connections[endpoint.alias]
    with transaction.atomic(using=endpoint.alias):
        taken = queue_sql(endpoint.queue, connection).claims.claim_by_delete(connection, [SeqRange()], 1)

        assert elsewhere(lambda: peek(endpoint)) == 1
        assert len(taken) == 1


@modes("NRS")
def test_when_a_message_between_others_is_in_flight_should_not_count_it(endpoint: Endpoint) -> None:
    endpoint.send_many(3)
    middle = endpoint.rows.order_by("seq")[1].seq
    with transaction.atomic(using=endpoint.alias):
        endpoint.rows.filter(seq=middle).delete()

        assert elsewhere(lambda: peek(endpoint)) == 2


@modes("NRS")
def test_when_a_receive_was_rolled_back_should_count_it_again(endpoint: Endpoint) -> None:
    endpoint.send_many(2)
    with transaction.atomic(using=endpoint.alias):
        endpoint.rows.all().delete()
        transaction.set_rollback(True, using=endpoint.alias)

    assert peek(endpoint) == 2


@modes("NRS")
def test_when_numbers_are_missing_between_messages_should_not_count_them(endpoint: Endpoint) -> None:
    endpoint.send_many(1000)
    first, last = endpoint.rows.earliest("seq").seq, endpoint.rows.latest("seq").seq
    endpoint.rows.exclude(seq__in=[first, last]).delete()

    assert peek(endpoint, limit=10_000) == 2, "upstream's max - min + 1 would say 1000"


@modes("R")
def test_when_messages_are_leased_or_expired_should_not_count_them(endpoint: Endpoint) -> None:
    endpoint.send_many(5)
    seqs = list(endpoint.rows.order_by("seq").values_list("seq", flat=True))
    endpoint.rows.filter(seq=seqs[0]).update(expires=Now() - timedelta(seconds=1))
    with endpoint.queue.receive(2, using=endpoint.alias):
        assert peek(endpoint) == 2

    assert peek(endpoint) == 4


@modes("NRS")
def test_when_message_receive_takes_long_should_not_block_the_peek(endpoint: Endpoint) -> None:
    release = threading.Event()
    endpoint.handle(lambda message, context: release.wait(DEADLINE))
    endpoint.send_many(3)
    worker = endpoint.start(concurrency=1)
    eventually(lambda: worker.pump.stats.received >= 1)

    assert elsewhere(lambda: peek(endpoint)) <= 2
    release.set()

    endpoint.wait_until_empty()


@modes("NRS")
def test_when_more_messages_are_estimated_than_present_should_receive_in_vain_twice_at_most(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No other look: on a busy machine one would fall between a claim and its commit, and see once more what that has
    # taken.
    estimates = iter([PeekResult(1000, 0, 1)])
    monkeypatch.setattr(QueuePump, "peek", lambda pump: next(estimates, None))
    endpoint.handle()
    endpoint.send_many(46)
    worker = endpoint.start(concurrency=2)

    eventually(lambda: endpoint.numbers == list(range(46)))
    worker.stop()

    assert worker.pump.stats.empty <= 2


@modes("NRS")
def test_when_queue_runs_dry_should_receive_in_vain_less_than_every_twentieth_time(endpoint: Endpoint) -> None:
    endpoint.handle()
    worker = endpoint.start(concurrency=4)

    for burst in range(1, 6):
        endpoint.send_many(40)
        eventually(lambda burst=burst: len(endpoint.calls) == 40 * burst)
    worker.stop()

    assert worker.pump.stats.empty <= 10
