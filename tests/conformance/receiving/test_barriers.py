"""Barriers, rule by rule, in each semantics, with several workers that are each a subscriber of its own."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from django.db import connections, transaction

from queueapp import Context, RetryLater, consumer
from queueapp.models import BarrierDelivery, DelayedMessage, PoisonMessage
from queueapp.receiving import barriers
from queueapp.sql import queue_sql
from queueapp.sql.claims import FOREVER_MS, SeqRange
from queueapp.sql.message_columns import Row
from tests.databases import DATABASES, marks_of
from tests.in_process_worker import Worker, eventually
from tests.testapp.ordering import (
    Fenced,
    FencedAddressed,
    FencedAtMostOnce,
    FencedByExpression,
    FencedCapped,
    FencedInTurns,
    FencedTransactional,
)

QUEUES = [Fenced, FencedTransactional, FencedAtMostOnce]
CASES = [
    pytest.param((queue, alias), id=f"{name}-{queue.delivery.semantics.value}", marks=marks_of(alias))
    for name, alias in DATABASES.items()
    for queue in QUEUES
]


class Step(msgspec.Struct):
    number: int
    barrier: bool = False


class Field:
    """A queue with barriers, and in which order its messages were handled, by which worker."""

    def __init__(self, queue: Any, alias: str) -> None:
        self.queue, self.alias = queue, alias
        self.began: list[int] = []
        self.attempts: list[int] = []
        self.ended: list[int] = []
        self.by: list[tuple[int, Any]] = []
        self._workers: list[Worker] = []

    def send(self, number: int, *, barrier: bool = False, **options: Any) -> None:
        if barrier:
            options["is_barrier"] = True
        self.queue.send(Step(number, barrier), using=self.alias, **options)

    def handle(self, act: Callable[[Step], Any] = lambda step: None, **options: Any) -> None:
        def handler(step: Step, context: Context) -> None:
            self.began.append(step.number)
            self.attempts.append(context.attempt)
            act(step)
            self.by.append((step.number, threading.current_thread().name))
            self.ended.append(step.number)

        consumer(self.queue, name="barriers", **options)(handler)

    def start(self, count: int = 1, concurrency: int = 2, **options: Any) -> list[Worker]:
        workers = [
            Worker(self.queue, self.alias, concurrency=concurrency, heartbeat=True, **options) for _ in range(count)
        ]
        self._workers += workers
        # A barrier goes to those that are there when it is released: no worker is to be done with it before the last
        # has come.
        for worker in workers:
            worker.start_services()
        for worker in workers:
            worker.start_receiving()
        return workers

    def close(self) -> None:
        for worker in self._workers:
            worker.stop()

    @property
    def rows(self) -> Any:
        return self.queue.objects.using(self.alias)

    @property
    def deliveries(self) -> Any:
        return BarrierDelivery.objects.using(self.alias)

    def times(self, number: int) -> int:
        return self.ended.count(number)


@pytest.fixture
def field(request: pytest.FixtureRequest, settings: Any, no_consumers: None) -> Iterator[Field]:
    settings.QUEUEAPP = {"PEEK_DELAY": 0.1, "RETRY_DELAY": 0, "DISPATCH_INTERVAL": 0.1}
    field = Field(*request.param)
    yield field
    field.close()


each_case = pytest.mark.parametrize("field", CASES, indirect=True)
leased = pytest.mark.parametrize("field", [case for case in CASES if case.values[0][0] is Fenced], indirect=True)


@pytest.fixture
def refusing_poison(field: Field) -> Iterator[None]:
    """A server without room: it refuses the first poison messages."""
    if connections[field.alias].vendor != "postgresql":
        pytest.skip("the trigger is PostgreSQL's")
    with connections[field.alias].cursor() as cursor:
        cursor.execute(
            "CREATE SEQUENCE refusals; CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
            "IF nextval('refusals') < 25 THEN RAISE EXCEPTION 'no room' USING ERRCODE = '53100'; END IF; RETURN NEW; "
            "END $$; "
            "CREATE TRIGGER refuse BEFORE INSERT ON queueapp_poisonmessage FOR EACH ROW EXECUTE FUNCTION refuse()"
        )
    yield
    with connections[field.alias].cursor() as cursor:
        cursor.execute("DROP FUNCTION refuse() CASCADE; DROP SEQUENCE refusals")


@each_case
def test_barrier_that_fails_while_the_server_has_no_room_is_kept_when_it_has(
    field: Field, refusing_poison: None
) -> None:
    def act(step: Step) -> None:
        if step.barrier:
            raise ValueError("bad")

    field.handle(act)
    field.start()
    field.send(100, barrier=True)
    field.send(1)

    eventually(lambda: field.times(1) == 1)
    poison = PoisonMessage.objects.using(field.alias)
    eventually(lambda: poison.count() == 1)
    assert field.began.count(100) == 1


@each_case
def test_barrier_rule_1_waits_until_every_previous_message_is_acked(field: Field) -> None:
    gate = threading.Event()
    for number in range(6):
        field.send(number)
    field.send(100, barrier=True)
    field.handle(lambda step: gate.wait(20) if step.number == 5 else None)
    field.start(2)

    # In some semantics what is handled waits for its batch, so those are not all gone; but the one is in flight.
    eventually(lambda: 5 in field.began)
    connection = connections[field.alias]
    assert queue_sql(field.queue, connection).barriers.first(connection) is not None
    assert barriers.release(field.queue, field.alias) == 0
    assert 100 not in field.began
    gate.set()

    eventually(lambda: field.times(100) == 2)
    assert sorted(field.ended[:6]) == list(range(6))


@each_case
def test_barrier_rule_2_nothing_behind_it_is_delivered_before_it(field: Field) -> None:
    """Of each worker: its barrier has ended before it begins with what was behind."""
    for number in range(10):
        field.send(number)
    field.send(100, barrier=True)
    for number in range(200, 230):
        field.send(number)
    field.handle()
    workers = field.start(3)

    eventually(lambda: field.rows.count() == 0 and field.times(100) == len(workers))
    first_behind = min(field.began.index(number) for number in range(200, 230))
    assert all(field.ended.index(number) < field.began.index(100) for number in range(10))
    assert first_behind > field.began.index(100)
    assert sorted(set(field.ended)) == [*range(10), 100, *range(200, 230)]


@each_case
def test_barrier_rule_3_goes_to_every_current_subscriber_once(field: Field) -> None:
    field.handle()
    workers = field.start(3)
    eventually(lambda: all(worker.pump.workers == 3 or worker.heartbeat for worker in workers))

    field.send(1)
    field.send(100, barrier=True)
    field.send(2)

    eventually(lambda: field.times(100) == 3 and field.times(2) == 1)
    assert set(field.attempts) == {1}
    assert field.deliveries.count() == 0


@each_case
def test_barrier_rule_3_one_without_a_subscriber_is_held(field: Field) -> None:
    field.send(100, barrier=True)
    field.send(2)

    assert barriers.release(field.queue, field.alias) == 0
    assert field.rows.count() == 2
    connection = connections[field.alias]
    assert queue_sql(field.queue, connection).barriers.first(connection) is not None

    field.handle()
    field.start()
    eventually(lambda: field.ended == [100, 2])


@each_case
def test_barrier_rule_4_is_removed_at_once_without_an_ack(field: Field) -> None:
    """One whose handler fails has been delivered all the same: it is kept for the record, and tried no more."""

    def act(step: Step) -> None:
        if step.barrier:
            raise ValueError("no")

    field.handle(act)
    field.send(100, barrier=True)
    field.send(2)
    field.start()

    eventually(lambda: field.ended == [2])
    eventually(lambda: PoisonMessage.objects.using(field.alias).count() == 1)
    poison = PoisonMessage.objects.using(field.alias).get()
    assert "a barrier, not retried" in poison.reason
    assert poison.deliveries == 1
    assert field.began.count(100) == 1


@each_case
def test_barrier_rule_6_adjacent_ones_are_released_together_in_order(field: Field) -> None:
    field.handle()
    field.start(2)
    field.send(1)
    for number in (100, 101, 102):
        field.send(number, barrier=True)
    field.send(2)

    eventually(lambda: field.times(2) == 1 and all(field.times(number) == 2 for number in (100, 101, 102)))
    assert field.ended[0] == 1
    assert [field.began.index(number) for number in (100, 101, 102)] == sorted(
        field.began.index(number) for number in (100, 101, 102)
    )


@leased
def test_barrier_a_retry_waits_in_its_place_and_holds_it(field: Field) -> None:
    failed: list[int] = []

    def act(step: Step) -> None:
        if step.number == 1 and len(failed) < 1:
            failed.append(step.number)
            raise ValueError("later")

    field.handle(act, policy=lambda failure: RetryLater(timedelta(seconds=1)), attempts=5)
    field.send(1)
    field.send(100, barrier=True)
    field.start(2)

    eventually(lambda: failed)
    assert DelayedMessage.objects.using(field.alias).count() == 0
    eventually(lambda: field.times(100) == 2)
    assert field.ended[0] == 1


@leased
def test_barrier_a_poisoned_message_does_not_hold_it(field: Field) -> None:
    def act(step: Step) -> None:
        if step.number == 1:
            raise ValueError("never")

    field.handle(act, attempts=1)
    field.send(1)
    field.send(100, barrier=True)
    field.start()

    eventually(lambda: field.times(100) == 1)
    assert PoisonMessage.objects.using(field.alias).count() == 1


@pytest.mark.parametrize("field", CASES[2::3], indirect=True)
def test_barrier_rule_8_at_most_once_waits_for_acks_and_hands_nothing_out_twice(field: Field) -> None:
    """What is handed out stays until it has been handled; of a worker that dies it goes with its leases."""
    connection = connections[field.alias]
    sql = queue_sql(field.queue, connection)
    token, owner = uuid.uuid4(), uuid.uuid4()
    field.send(1)
    field.send(100, barrier=True)
    (row,) = sql.claims.claim_by_lease(connection, [SeqRange()], 10, token, owner, FOREVER_MS)
    field.handle()
    field.start()

    assert row[0] == field.rows.order_by("seq")[0].seq
    eventually(lambda: field._workers[0].pump.stats.peeks > 5)
    assert field.began == []

    assert sql.limits.delete_in_flight(connection, owner, 100) == 1
    eventually(lambda: field.ended == [100])
    assert field.rows.count() == 0


@each_case
def test_barrier_rule_8_a_sender_that_commits_late_is_before_it(field: Field) -> None:
    """The barrier gets its place when the sends that are open have ended; meanwhile its own waits."""
    committed = threading.Event()
    sent = threading.Event()

    def send_slowly() -> None:
        try:
            with transaction.atomic(using=field.alias):
                field.send(1)
                sent.set()
                committed.wait(20)
        finally:
            connections[field.alias].close()

    def send_barrier() -> None:
        try:
            field.send(100, barrier=True)
        finally:
            connections[field.alias].close()

    slow = threading.Thread(target=send_slowly)
    slow.start()
    assert sent.wait(20)
    fast = threading.Thread(target=send_barrier)
    fast.start()
    fast.join(0.3)
    assert fast.is_alive(), "it waits for the open send"
    committed.set()
    slow.join(20)
    fast.join(20)
    assert [row.is_barrier for row in field.rows.order_by("seq")] == [False, True]

    field.handle()
    field.start(2)
    eventually(lambda: field.times(100) == 2)
    assert field.ended[0] == 1


@each_case
def test_barrier_whose_time_is_over_holds_nothing(field: Field) -> None:
    field.send(100, barrier=True, expires_in=timedelta(milliseconds=1))
    field.send(2)
    connection = connections[field.alias]
    eventually(lambda: queue_sql(field.queue, connection).barriers.first(connection) is None)
    field.handle()
    field.start()

    eventually(lambda: field.ended == [2])
    assert field.began == [2]


@each_case
def test_barrier_receive_is_a_subscriber_of_its_own(field: Field) -> None:
    field.send(1)
    field.send(100, barrier=True)
    field.send(2)

    with field.queue.receive(10, using=field.alias) as batch:
        (first,) = batch
        assert first.decode(Step).number == 1
        assert first.deliveries == 1
        with field.queue.receive(10, using=field.alias) as behind:
            assert list(behind) == []
        first.ack()
    with field.queue.receive(10, using=field.alias) as batch:
        (barrier,) = batch
        assert barrier.is_barrier
        assert barrier.deliveries == 1
        assert barrier.decode(Step).number == 100
        barrier.ack()
    with field.queue.receive(10, using=field.alias) as batch:
        (last,) = batch
        assert last.decode(Step).number == 2
        last.ack()
    assert field.rows.count() == 0
    assert field.deliveries.count() == 0


@each_case
@pytest.mark.parametrize("way", ["bulk", "rows"])
def test_barrier_bulk_and_delayed_sends_take_the_same_lock(field: Field, way: str) -> None:
    """A sender waits while a barrier is on its way, so that none slips in between."""
    release = threading.Event()
    sent = threading.Event()
    done: list[str] = []

    def barrier() -> None:
        try:
            with transaction.atomic(using=field.alias):
                field.send(100, barrier=True)
                sent.set()
                release.wait(20)
        finally:
            connections[field.alias].close()

    def bulk() -> None:
        try:
            if way == "bulk":
                field.queue.send_many([Step(1), Step(2)], using=field.alias)
            else:  # as the journal and a forwarder insert
                rows = [Row(0, uuid.uuid4(), "{}", b"1"), Row(0, uuid.uuid4(), "{}", b"2")]
                with transaction.atomic(using=field.alias):
                    connection = connections[field.alias]
                    assert queue_sql(field.queue, connection).inserts.insert_rows(connection, rows) == 2
            done.append("bulk")
        finally:
            connections[field.alias].close()

    threads = [threading.Thread(target=barrier), threading.Thread(target=bulk)]
    threads[0].start()
    assert sent.wait(20)
    threads[1].start()
    threads[1].join(0.3)
    assert done == []
    release.set()
    for thread in threads:
        thread.join(20)
    assert [row.is_barrier for row in field.rows.order_by("seq")] == [True, False, False]


@pytest.mark.parametrize(
    "field",
    [pytest.param((FencedAddressed, alias), id=name, marks=marks_of(alias)) for name, alias in DATABASES.items()],
    indirect=True,
)
def test_barrier_is_one_for_all_recipients(field: Field) -> None:
    order: list[tuple[str, int]] = []

    def single_consumer(step: Step) -> None:
        order.append(("one", step.number))

    def two(step: Step) -> None:
        order.append(("two", step.number))

    consumer(field.queue, name="one")(single_consumer)
    consumer(field.queue, name="two")(two)
    field.send(1)
    field.send(100, barrier=True)
    field.send(2)
    field.start(concurrency=4)

    eventually(lambda: len(order) == 6)
    assert sorted(order[:2]) == [("one", 1), ("two", 1)]
    assert sorted(order[2:4]) == [("one", 100), ("two", 100)]
    assert sorted(order[4:]) == [("one", 2), ("two", 2)]


@pytest.mark.parametrize(
    "field",
    [pytest.param((FencedByExpression, alias), id=name, marks=marks_of(alias)) for name, alias in DATABASES.items()],
    indirect=True,
)
def test_barrier_expression_finds_it_when_it_is_sent_and_when_others_insert_it(field: Field) -> None:
    """What others insert is held until it is evaluated, and until then what is behind it waits: it may be a barrier."""
    queue, alias = field.queue, field.alias
    sql, connection = queue_sql(queue, connections[alias]), connections[alias]
    queue.send({"n": 1}, using=alias)
    queue.send_many([{"n": 2}, {"n": 3, "last": True}, {"n": 4}], using=alias)
    assert list(field.rows.order_by("seq").values_list("is_barrier", flat=True)) == [False, False, True, False]
    with queue.receive(10, using=alias) as batch:
        assert [message.body["n"] for message in batch if message.ack() is None] == [1, 2]
    with queue.receive(10, using=alias) as batch:
        assert [message.body["n"] for message in batch] == [3]
    with queue.receive(10, using=alias) as batch:
        assert [message.body["n"] for message in batch if message.ack() is None] == [4]

    field.rows.bulk_create([queue(headers="{}", body=b'{"n": 5, "last": true}')])
    queue.send({"n": 6}, using=alias)
    assert sql.claims.claim_by_lease(connection, [SeqRange()], 10, uuid.uuid4(), uuid.uuid4(), 1000) == []
    with queue.receive(10, using=alias) as batch:
        assert [message.body["n"] for message in batch] == [5]
    with queue.receive(10, using=alias) as batch:
        assert [message.body["n"] for message in batch if message.ack() is None] == [6]

    field.rows.bulk_create([queue(headers="{}", body=b'{"n": 7}', is_barrier=True)])
    with queue.receive(10, using=alias) as batch:
        assert [(message.body["n"], message.is_barrier) for message in batch] == [(7, True)]


@each_case
def test_barrier_goes_to_a_worker_with_a_backlog_of_0(field: Field) -> None:
    """It takes no room in a backlog and needs none; other messages such a worker never gets."""
    field.handle()
    (idle,) = field.start(backlog=0)
    field.start()

    field.send(1)
    field.send(100, barrier=True)
    field.send(2)

    eventually(lambda: field.times(100) == 2 and field.times(2) == 1)
    assert field.times(1) == 1
    assert idle.pump.stats.received == 1
    assert field.deliveries.count() == 0


@each_case
def test_barrier_goes_to_no_worker_whose_filter_does_not_match_it(field: Field) -> None:
    field.handle()
    (picky,) = field.start(filter="/number < 10")
    field.start(filter="/number > 10")

    field.send(1)
    field.send(100, barrier=True)
    field.send(2)

    eventually(lambda: sorted(field.ended) == [1, 2, 100])
    eventually(lambda: picky.pump.stats.handled == 2)
    eventually(lambda: not field.deliveries.exists())


@pytest.mark.parametrize(
    "field",
    [
        pytest.param((queue, alias), id=f"{name}-{queue.__name__}", marks=marks_of(alias))
        for name, alias in DATABASES.items()
        for queue in (FencedCapped, FencedInTurns)
    ],
    indirect=True,
)
def test_barrier_on_a_queue_that_counts_what_is_out(field: Field) -> None:
    field.handle()
    field.start(2)
    for number in range(10):
        field.send(number)
    field.send(100, barrier=True)
    for number in range(200, 210):
        field.send(number)

    eventually(lambda: field.rows.count() == 0 and field.times(100) == 2)
    first = field.began.index(100)
    assert all(field.ended.index(number) < first for number in range(10))
    assert all(field.began.index(number) > first for number in range(200, 210))
    assert sorted(set(field.ended)) == [*range(10), 100, *range(200, 210)]
