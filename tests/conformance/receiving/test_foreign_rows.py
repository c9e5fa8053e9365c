"""A row that a foreign writer inserts into a queue with expressions is pending until they are evaluated: no worker has
it before, and then it is received, dropped or kept as poison."""

from __future__ import annotations

import json
import logging
import threading
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.db import connections, transaction

from queueapp.errors import InvalidOption
from queueapp.models.delivery import Delivery
from queueapp.operations import control, statistics
from queueapp.sending import preparation
from queueapp.services import expression_evaluator
from queueapp.services.expression_evaluator import ExpressionEvaluator
from queueapp.services.orphaned_leases import release_orphaned_leases
from queueapp.services.service import stop_all
from queueapp.topics import evaluate_pending
from queueapp.topics.evaluate_pending import PendingResult, evaluate_pending_messages
from tests.conformance.endpoint import Endpoint, modes
from tests.in_process_worker import DEADLINE, eventually
from tests.kill_session import kill_this
from tests.testapp.models import Filtered

JSON = '{"type":"tests.conformance.endpoint.Note","content-type":"application/json"}'


@pytest.fixture
def filtered(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    """A queue with a filter, in the semantics of ``endpoint``."""
    delivery = Delivery(Filtered.delivery.given | {"semantics": endpoint.queue.delivery.semantics}, "a test's ")
    monkeypatch.setattr(Filtered, "delivery", delivery)
    filtered = Endpoint(Filtered, endpoint.alias, endpoint.tag)
    yield filtered
    filtered.close()


@pytest.fixture
def evaluation(filtered: Endpoint) -> Iterator[Callable[[], ExpressionEvaluator]]:
    services: list[ExpressionEvaluator] = []

    def start() -> ExpressionEvaluator:
        services.append(ExpressionEvaluator(filtered.alias, [Filtered]))
        services[-1].start()
        return services[-1]

    yield start
    assert stop_all(services, DEADLINE)


def insert(endpoint: Endpoint, *numbers: int, headers: str = JSON, body: bytes | None = None) -> None:
    """As a producer that knows nothing of us: id, headers, body."""
    with connections[endpoint.alias].cursor() as cursor:
        for number in numbers:
            stored = body if body is not None else json.dumps({"tag": endpoint.tag, "number": number}).encode()
            cursor.execute(
                f"INSERT INTO {Filtered._meta.db_table} (id, headers, body) VALUES (%s, %s, %s)",
                [str(uuid.uuid4()), headers, stored],
            )


def held(endpoint: Endpoint) -> int:
    return int(endpoint.rows.filter(control.pending_evaluation()).count())


# -- what becomes of it --------------------------------------------------------------------------------------------


def test_a_foreign_row_is_received_when_it_was_evaluated_and_not_before(
    filtered: Endpoint, evaluation: Callable[[], ExpressionEvaluator]
) -> None:
    filtered.handle()
    insert(filtered, 1, 2, 3)
    filtered.send(4)
    filtered.start()
    eventually(lambda: filtered.numbers == [4])
    assert held(filtered) == 3

    evaluation()

    filtered.wait_until_empty()
    assert filtered.numbers == [1, 2, 3, 4]


def test_filter_drops_a_foreign_row_that_it_does_not_match(
    filtered: Endpoint, evaluation: Callable[[], ExpressionEvaluator], caplog: pytest.LogCaptureFixture
) -> None:
    insert(filtered, 1, 100, 2, 101)

    service = evaluation()

    eventually(lambda: not held(filtered))
    assert filtered.rows.count() == 2
    eventually(lambda: service.refused["testapp.Filtered"] == 2)
    insert(filtered, 102)
    eventually(lambda: service.refused["testapp.Filtered"] == 3)
    reported = [record.getMessage() for record in caplog.records if "dropped" in record.getMessage()]
    assert reported == ["testapp.Filtered: dropped 2 inserted messages that the queue's filter does not accept."]


@pytest.mark.parametrize(
    ("headers", "body"), [(JSON, b"{not JSON"), ("not JSON", b'{"number":1}'), ("{}", b"\xff\x00\xfe")]
)
@modes("R")
def test_a_foreign_row_that_cannot_be_read_is_poison_with_its_bytes(
    filtered: Endpoint, evaluation: Callable[[], ExpressionEvaluator], headers: str, body: bytes
) -> None:
    insert(filtered, 0, headers=headers, body=body)
    insert(filtered, 7)

    evaluation()

    eventually(lambda: not held(filtered))
    poison = filtered.poison.get()
    assert (poison.queue, poison.headers, bytes(poison.body)) == ("testapp.Filtered", headers, body)
    assert "cannot be read" in poison.reason
    assert filtered.rows.count() == 1


@modes("R")
def test_a_foreign_row_keeps_its_place(filtered: Endpoint) -> None:
    filtered.send(1)
    insert(filtered, 2)
    filtered.send(3)
    with filtered.queue.receive(10, using=filtered.alias) as batch:
        assert [message.body["number"] for message in batch] == [1, 2, 3]


def test_receive_evaluates_a_batch_itself(filtered: Endpoint) -> None:
    insert(filtered, 1, 200, 2)
    with filtered.queue.receive(10, using=filtered.alias) as batch:
        assert [message.body["number"] for message in batch] == [1, 2]
    assert held(filtered) == 0


@modes("S")
def test_what_receive_has_evaluated_in_a_transaction_that_is_rolled_back_is_held_again(filtered: Endpoint) -> None:
    insert(filtered, 1, 200)
    with pytest.raises(ZeroDivisionError), filtered.queue.receive(10, using=filtered.alias):
        raise ZeroDivisionError
    assert held(filtered) == 2


# -- exactly once, in any process-------------------------------------------------------------------------------


@modes("R")
def test_several_processes_share_the_work_and_nothing_is_done_twice(
    filtered: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    insert(filtered, *range(50), *range(100, 150))
    found: list[PendingResult] = []

    def work() -> None:
        try:
            while (messages := evaluate_pending_messages(Filtered, filtered.alias, 7)).total:
                found.append(messages)
        finally:
            connections[filtered.alias].close()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    assert held(filtered) == 0
    assert (sum(item.freed for item in found), sum(item.refused for item in found)) == (50, 50)
    assert filtered.rows.count() == 50


@modes("R")
def test_rows_that_another_process_evaluates_are_not_waited_for(filtered: Endpoint) -> None:
    insert(filtered, 1, 2)
    done = []

    def second_second_handler() -> None:
        done.append(evaluate_pending_messages(Filtered, filtered.alias))
        connections[filtered.alias].close()

    with transaction.atomic(using=filtered.alias):
        assert evaluate_pending_messages(Filtered, filtered.alias, 1).freed == 1
        thread = threading.Thread(target=second_second_handler)
        thread.start()
        thread.join(DEADLINE)
    assert done == [PendingResult(freed=1)]


@modes("R")
def test_a_batch_that_dies_before_its_commit_is_done_again(filtered: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    insert(filtered, 1, 200)
    insert(filtered, 0, body=b"{")

    def died(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(evaluate_pending.notifier, "sent", died)
        with pytest.raises(KeyboardInterrupt):
            evaluate_pending_messages(Filtered, filtered.alias)
    assert held(filtered) == 3
    assert filtered.poison.count() == 0

    assert evaluate_pending_messages(Filtered, filtered.alias) == PendingResult(1, 1, 1)


@modes("R")
def test_a_lost_connection_is_survived(
    filtered: Endpoint, evaluation: Callable[[], ExpressionEvaluator], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, killed = evaluate_pending.notifier.sent, []

    def kill_once(queue: Any, connection: Any) -> None:
        if not killed:
            killed.append(True)
            kill_this(connection)
        sent(queue, connection)

    monkeypatch.setattr(evaluate_pending.notifier, "sent", kill_once)
    insert(filtered, 1, 2)
    evaluation()

    eventually(lambda: not held(filtered))
    assert killed
    assert filtered.rows.count() == 2


# -- nothing takes it for a lease, or frees it -----------------------------------------------------------------------


@modes("R")
def test_a_held_row_is_neither_leased_nor_waiting_in_the_figures(filtered: Endpoint) -> None:
    insert(filtered, 1, 2)
    filtered.send(3)
    found = statistics.Database(filtered.alias).stats_of(Filtered)
    assert (found.waiting, found.leased, found.lease_expired, found.pending_evaluation) == (1, 0, 0, 2)
    assert found.note == "2 pending evaluation"


@modes("R")
def test_a_held_row_is_not_freed_by_what_ends_leases(filtered: Endpoint) -> None:
    insert(filtered, 1)
    seqs = list(filtered.rows.values_list("pk", flat=True))

    assert control.release_leases(Filtered, seqs, using=filtered.alias) == 0
    release_orphaned_leases(filtered.alias)

    assert held(filtered) == 1


@modes("R")
def test_a_held_row_can_be_deleted_and_purged(filtered: Endpoint) -> None:
    insert(filtered, 1, 2)
    seqs = list(filtered.rows.values_list("pk", flat=True))
    assert control.delete(Filtered, seqs[:1], using=filtered.alias) == 1
    assert control.purge(Filtered, using=filtered.alias).deleted == 1


@modes("NRS")
def test_our_own_rows_are_never_held(filtered: Endpoint) -> None:
    filtered.send(1)
    filtered.send_many(3)
    filtered.send(2, expires_in=timedelta(hours=1), headers={"a": "b"})
    assert held(filtered) == 0
    assert filtered.rows.filter(lease_expires__isnull=True).count() == 5


# -- where it cannot be evaluated ------------------------------------------------------------------------------------


@modes("R")
def test_what_cannot_be_evaluated_here_stays_held_and_is_reported_once(
    filtered: Endpoint,
    evaluation: Callable[[], ExpressionEvaluator],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tries: list[Any] = []

    def missing(queue: Any) -> None:
        tries.append(queue)
        raise InvalidOption("testapp.Filtered.Delivery.filter", "/number < 100", preparation.NEEDS_EXTRA)

    def tried(times: int) -> bool:
        service.wake()
        return len(tries) >= times

    monkeypatch.setattr(evaluate_pending, "rules_of", missing)
    monkeypatch.setattr(expression_evaluator, "log", logging.getLogger("queueapp.workers"))
    insert(filtered, 1)
    service = evaluation()

    eventually(lambda: tried(3))  # whatever is said of the first and the second has been said when the third begins
    assert held(filtered) == 1
    reported = [record.getMessage() for record in caplog.records if "cannot be evaluated" in record.getMessage()]
    assert len(reported) == 1
    assert "queueapp[expressions]" in reported[0]
