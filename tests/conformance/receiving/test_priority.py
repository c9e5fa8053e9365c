"""A priority of 64 bits and workers: in each semantics, beside levels, with consumers that know only some types."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from django.db import connections

from queueapp import Context, consumer, messages
from queueapp.messages import encode
from queueapp.sql import queue_sql
from queueapp.sql.message_columns import Outgoing, Row
from tests.databases import DATABASES, marks_of
from tests.in_process_worker import Worker, eventually
from tests.testapp.ordering import Ranked, RankedAtMostOnce, RankedCapped, RankedInTurns, RankedTransactional

CASES = [
    pytest.param((queue, alias), id=f"{name}-{queue.delivery.semantics.value}", marks=marks_of(alias))
    for name, alias in DATABASES.items()
    for queue in (Ranked, RankedTransactional, RankedAtMostOnce)
]


class Bid(msgspec.Struct):
    price: int


class Unrelated(msgspec.Struct):
    price: int


class Market:
    """A queue by price, and in which order its messages were handled."""

    def __init__(self, queue: Any, alias: str) -> None:
        self.queue, self.alias = queue, alias
        self.prices: list[int] = []
        self._workers: list[Worker] = []

    def bid(self, *prices: int, cls: type = Bid) -> None:
        """Messages as the evaluation of the expression leaves them."""
        rows = []
        for price in prices:
            headers, body = encode(cls(price), None)
            rows.append(Outgoing(messages.new_id(), headers, body)._replace(priority=price))
        connection = connections[self.alias]
        queue_sql(self.queue, connection).inserts.insert_many(connection, rows)

    def handle(self, act: Callable[[Bid], Any] = lambda bid: None, **options: Any) -> None:
        def handler(bid: Bid, context: Context) -> None:
            self.prices.append(bid.price)
            act(bid)

        consumer(self.queue, name="bids", **options)(handler)

    def start(self, **options: Any) -> Worker:
        worker = Worker(self.queue, self.alias, **options)
        self._workers.append(worker)
        return worker.start()

    def close(self) -> None:
        for worker in self._workers:
            worker.stop()

    @property
    def remaining(self) -> int:
        count: int = self.queue.objects.using(self.alias).count()
        return count


@pytest.fixture
def market(request: pytest.FixtureRequest, settings: Any, no_consumers: None) -> Iterator[Market]:
    settings.QUEUEAPP = {"PEEK_DELAY": 0.1, "RETRY_DELAY": 0}
    market = Market(*request.param)
    yield market
    market.close()


each_case = pytest.mark.parametrize("market", CASES, indirect=True)


@each_case
def test_priority_one_task_handles_the_highest_first_and_all_of_them(market: Market, nothing_is_stuck: None) -> None:
    prices = [(n * 7_919) % 400 * 10**15 for n in range(400)]
    market.bid(*prices)
    market.handle()
    market.start(concurrency=1)

    eventually(lambda: market.remaining == 0 and len(market.prices) == 400)
    assert market.prices == sorted(prices, reverse=True)


@each_case
def test_priority_newcomer_is_handled_next(market: Market, nothing_is_stuck: None) -> None:
    """Sent while one task works through a backlog whose every price is lower."""
    gate, at_gate = threading.Event(), threading.Event()

    def act(bid: Bid) -> None:
        if bid.price == 150:
            at_gate.set()
            assert gate.wait(20)

    market.bid(*range(200))
    market.handle(act)
    market.start(concurrency=1)
    assert at_gate.wait(20)
    market.bid(2**62)
    gate.set()

    eventually(lambda: market.remaining == 0 and len(market.prices) == 201)
    # What was claimed with the one at the gate is in flight already: no more than a batch, which is short for slow
    # handlers.
    after = market.prices[market.prices.index(150) + 1 :]
    assert 2**62 in after[: 201 - 1]
    assert [price for price in market.prices if price != 2**62] == list(range(199, -1, -1))


@each_case
def test_priority_several_tasks_and_workers_lose_and_double_nothing(market: Market) -> None:
    market.handle()
    for _ in range(2):
        market.start(concurrency=3)
    for block in range(20):
        market.bid(*range(block, 500, 20))

    eventually(lambda: market.remaining == 0 and len(market.prices) >= 500)
    assert sorted(market.prices) == list(range(500))


@each_case
def test_priority_unknown_types_are_skipped(market: Market) -> None:
    market.bid(*range(1000, 1100), cls=Unrelated)
    market.bid(*range(50))
    market.handle()
    market.start(concurrency=2)
    eventually(lambda: len(market.prices) == 50)

    market.bid(1050, 2000)

    eventually(lambda: len(market.prices) == 52)
    assert market.prices[-2:] in ([2000, 1050], [1050, 2000])
    eventually(lambda: market.remaining == 100)


@each_case
def test_priority_a_failed_message_is_retried_in_its_place(market: Market) -> None:
    if market.queue is RankedAtMostOnce:
        pytest.skip("AT_MOST_ONCE retries nothing")
    failed: list[int] = []

    def act(bid: Bid) -> None:
        if bid.price == 40 and not failed:
            failed.append(1)
            raise ValueError("once")

    market.bid(*range(50))
    market.handle(act, attempts=3)
    market.start(concurrency=1)

    eventually(lambda: market.remaining == 0 and len(market.prices) == 51)
    assert market.prices.count(40) == 2


@pytest.mark.parametrize(
    "market",
    [
        pytest.param((queue, alias), id=f"{name}-{queue.__name__}", marks=marks_of(alias))
        for name, alias in DATABASES.items()
        for queue in (RankedCapped, RankedInTurns)
    ],
    indirect=True,
)
def test_priority_on_a_queue_that_counts_what_is_out(market: Market) -> None:
    market.bid(3, 2**62, -5, 7)
    with market.queue.receive(2, using=market.alias) as batch:
        assert [message.decode(Bid).price for message in batch] == [2**62, 7]  # and both come back
    market.handle()
    market.start(heartbeat=True)

    eventually(lambda: len(market.prices) == 4)
    assert sorted(market.prices) == [-5, 3, 7, 2**62]
    eventually(lambda: not market.queue.objects.using(market.alias).exists())


@each_case
def test_priority_of_64_bits_is_kept_by_what_comes_in_rows(market: Market) -> None:
    """As the journal and a forwarder insert."""
    connection = connections[market.alias]
    rows = [Row(0, messages.new_id(), "{}", b"1", priority=priority) for priority in (2**62, -(2**62))]

    assert queue_sql(market.queue, connection).inserts.insert_rows(connection, rows) == 2

    found = market.queue.objects.using(market.alias).order_by("seq").values_list("priority", flat=True)
    assert list(found) == [2**62, -(2**62)]
