"""Ordering keys: messages with one key one after the other and in order, other keys beside them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import connections, transaction

from queueapp import InvalidMessage, RetryLater, consumer
from queueapp.messages import ORDERING_KEY, decode_headers, new_id
from queueapp.models import DelayedMessage
from queueapp.sql import queue_sql
from queueapp.sql.claims import BODY, SeqRange
from tests.databases import parametrize_alias
from tests.in_process_worker import Worker, eventually, real_commits
from tests.testapp.messages import Ping
from tests.testapp.models import Effect, Leased, Ordered, OrderedPassing, OrderedTransactional

pytestmark = real_commits


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One case per database."""
    parametrize_alias(metafunc, real_commits.kwargs["available_apps"])


def send(alias: str, *texts: str, queue: Any = Ordered) -> None:
    """A message for each text, whose first letter is its key; "-" has none."""
    for text in texts:
        queue.send(text, ordering_key=None if text[0] == "-" else text[0], using=alias)


def bodies(batch: Any) -> list[str]:
    return [message.body for message in batch]


def claim(alias: str, limit: int) -> list[str]:
    """What a claim of another client takes, as texts."""
    connection = connections[alias]
    rows = queue_sql(Ordered, connection).claims.claim_by_lease(
        connection, [SeqRange(0)], limit, new_id(), new_id(), 60_000
    )
    return [json.loads(row[BODY]) for row in rows]


def test_the_key_is_in_the_headers_and_in_a_generated_column(alias: str) -> None:
    send(alias, "a1", "-2")
    Ordered.send_many(["b3", "b4", "c5"], ordering_key=lambda text: text[0], using=alias)
    Ordered.send_many(["d6"], ordering_key="d", using=alias)

    rows = Ordered.objects.using(alias).order_by("seq")
    assert [row.ordering_key for row in rows] == ["a", None, "b", "b", "c", "d"]
    assert decode_headers(rows[0].headers)[ORDERING_KEY] == "a"
    with pytest.raises(InvalidMessage, match="ordering"):
        Leased.send("a", ordering_key="a", using=alias)
    with pytest.raises(InvalidMessage, match="200"):
        Ordered.send("a", ordering_key="a" * 201, using=alias)


def test_a_key_in_flight_is_left_out_and_others_are_found_behind_it(alias: str) -> None:
    send(alias, "a1", "a2", "b1", "a3", "-1", "b2")
    with Ordered.receive(2, using=alias) as first:
        assert bodies(first) == ["a1", "a2"]
        with Ordered.receive(9, using=alias) as second:
            assert bodies(second) == ["b1", "-1", "b2"]
            for message in second:
                message.ack()
        for message in first:
            message.ack()
    with Ordered.receive(9, using=alias) as third:
        assert bodies(third) == ["a3"]


def test_what_was_given_back_comes_first(alias: str) -> None:
    send(alias, "a1", "a2", "a3")
    with Ordered.receive(2, using=alias) as batch:
        batch[0].cancel()
        assert claim(alias, 9) == []  # the second is still leased
    assert claim(alias, 2) == ["a1", "a2"]
    assert claim(alias, 9) == []


def test_messages_behind_one_that_another_claim_has_locked_stay(alias: str) -> None:
    """The lease of the first is not committed: neither its row nor its state can be seen to be taken."""
    send(alias, "a1", "a2", "b1")
    claimed, ended, found = threading.Event(), threading.Event(), list[str]()

    def lock_first() -> None:
        try:
            with transaction.atomic(using=alias):
                found.extend(claim(alias, 1))
                claimed.set()
                ended.wait(30)
        finally:
            connections.close_all()

    thread = threading.Thread(target=lock_first)
    thread.start()
    try:
        assert claimed.wait(30)
        second = claim(alias, 9)
    finally:
        ended.set()
        thread.join(60)

    assert found == ["a1"]
    assert second == ["b1"]


@pytest.mark.parametrize("queue", [Ordered, OrderedTransactional], ids=lambda queue: queue.__name__)
def test_a_retry_holds_its_key(alias: str, queue: Any, delivery: Any) -> None:
    """The first fails twice; a message that is retried later waits in its place."""
    delivery(queue, policy=lambda failure: RetryLater(timedelta(milliseconds=50)))
    for name in ("a1", "a2", "b1", "a3"):
        queue.send(Ping(name, fail=2 * (name == "a1")), ordering_key=name[0], using=alias)
    worker = Worker(queue, alias)
    worker.start()
    try:
        eventually(lambda: not queue.objects.using(alias).exists())
    finally:
        worker.stop()

    names = list(Effect.objects.using(alias).order_by("pk").values_list("name", flat=True))
    assert [name for name in names if name[0] == "a"] == ["a1", "a2", "a3"]
    assert sorted(names) == ["a1", "a2", "a3", "b1"]


def test_a_retry_passes_where_the_queue_says_so(alias: str, delivery: Any) -> None:
    delivery(OrderedPassing, policy=lambda failure: RetryLater(timedelta(hours=1)))
    for name in ("a1", "a2"):
        OrderedPassing.send(Ping(name, fail=2 * (name == "a1")), ordering_key="a", using=alias)
    worker = Worker(OrderedPassing, alias)
    worker.start()
    try:
        eventually(lambda: Effect.objects.using(alias).filter(name="a2").exists())
    finally:
        worker.stop()

    assert decode_headers(DelayedMessage.objects.using(alias).get().headers)[ORDERING_KEY] == "a"


def test_a_hot_key_and_many_keys(alias: str, django_assert_max_num_queries: Callable[..., Any]) -> None:
    """A message behind a thousand of a key in flight is found by one claim; so is the first of each of many keys."""
    Ordered.send_many([f"a{number}" for number in range(1000)], ordering_key="a", using=alias)
    send(alias, "b1")
    assert claim(alias, 10) == [f"a{number}" for number in range(10)]
    with django_assert_max_num_queries(3, connection=connections[alias]):
        assert claim(alias, 10) == ["b1"]

    Ordered.send_many([f"k{n} {m}" for m in range(2) for n in range(200)], ordering_key=lambda text: text.split()[0],
                      using=alias)  # fmt: skip
    assert claim(alias, 200) == [f"k{n} 0" for n in range(200)]
    assert claim(alias, 200) == []


@pytest.mark.parametrize("queue", [Ordered, OrderedTransactional])
def test_fast_handlers_get_larger_batches(no_consumers: None, start_worker: Callable[..., Worker], queue: Any) -> None:
    """Not a claim for each message, though a claim in order does not say how far a queue is empty."""
    done: list[int] = []
    consumer(queue, name="fast")(done.append)
    queue.send_many(range(300), ordering_key=lambda number: f"key {number % 100}")

    worker = start_worker(queue, concurrency=1)

    eventually(lambda: len(done) == 300)
    assert max(receiver.size.n for receiver in worker.pump.receivers) > 1
    assert [number for number in done if number % 100 == 7] == [7, 107, 207]


def test_receive_of_a_transactional_queue_leaves_out_the_keys_of_open_blocks(alias: str) -> None:
    for key in ("a", "a", "b"):
        OrderedTransactional.send(Ping(key), ordering_key=key, using=alias)

    with OrderedTransactional.receive(1, using=alias) as first, OrderedTransactional.receive(9, using=alias) as second:
        assert [message.body["name"] for message in first] == ["a"]
        assert [message.body["name"] for message in second] == ["b"]
