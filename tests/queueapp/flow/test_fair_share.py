"""Keys that take turns, their weights, and the limits of one key: of messages in flight, and of messages in a time.

``QUEUEAPP_FLOOD`` has the number of messages of the tenant that floods the queue: few in the suite, a million where
that is asked for.
"""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from time import monotonic
from typing import Any

import pytest
from django.db import connections, transaction
from django.db.models import F

from queueapp import InvalidOption, QueueError, RetryNow, consumer
from queueapp.flow import rate_limit
from queueapp.messages import new_id
from queueapp.models import KeyTokenBucket
from queueapp.models.delivery import Delivery
from queueapp.sql import queue_sql
from queueapp.sql.claims import BODY, SEQ, SeqRange
from queueapp.testing import Kit
from tests.databases import parametrize_alias
from tests.in_process_worker import Worker, eventually, real_commits
from tests.testapp.models import (
    Leased,
    LimitedPerKey,
    LimitedPerKeyTransactional,
    RatedPerKey,
    RatedPerKeyFast,
    RatedPerKeyTransactional,
    Shared,
    SharedTransactional,
    Weighted,
)

pytestmark = real_commits

FLOOD = int(os.environ.get("QUEUEAPP_FLOOD", "3000"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One case per database."""
    parametrize_alias(metafunc, real_commits.kwargs["available_apps"])


def send(alias: str, *texts: str, queue: Any = Shared) -> None:
    """A message for each text, whose first letter is its tenant; "-" has none."""
    for text in texts:
        queue.send(text, headers=None if text[0] == "-" else {"tenant": text[0]}, using=alias)


def flood(alias: str, count: int, tenant: str = "f", queue: Any = Shared) -> None:
    queue.send_many((f"{tenant}{n}" for n in range(count)), headers={"tenant": tenant}, using=alias)


def claim(alias: str, limit: int, queue: Any = Shared, ranges: Any = None, lease_ms: int = 60_000) -> list[Any]:
    """What a claim of a worker takes, as rows."""
    connection = connections[alias]
    return queue_sql(queue, connection).claims.claim_by_lease(
        connection, ranges or [SeqRange(0)], limit, new_id(), new_id(), lease_ms
    )


def texts(rows: list[Any]) -> list[str]:
    return [json.loads(row[BODY]) for row in rows]


def tenants(rows: list[Any]) -> Counter[str]:
    return Counter(text[0] for text in texts(rows))


# -- turns -------------------------------------------------------------------------------------------------------------


def test_the_key_is_a_generated_column_of_the_header(alias: str) -> None:
    send(alias, "a1", "-1")
    Shared.send("long", headers={"tenant": "x" * 300}, using=alias)

    keys = Shared.objects.using(alias).order_by("seq").values_list("fair_key", flat=True)
    assert list(keys) == ["a", "", "x" * 200]
    assert "fair_key" not in {field.name for field in Leased._meta.fields}


def test_a_tenant_that_floods_the_queue_does_not_delay_another_ones_message(alias: str) -> None:
    flood(alias, FLOOD)
    assert texts(claim(alias, 50)) == [f"f{n}" for n in range(50)]
    send(alias, "a1")

    assert tenants(claim(alias, 10)) == {"f": 5, "a": 1}


def test_tenants_get_equal_shares_and_each_is_served_in_order(alias: str) -> None:
    for tenant, count in (("a", 20), ("b", 2), ("c", 20), ("-", 20)):
        send(alias, *(f"{tenant}{n}" for n in range(count)))

    assert sorted(texts(claim(alias, 8))) == ["-0", "-1", "a0", "a1", "b0", "b1", "c0", "c1"]
    assert texts(claim(alias, 6)) == ["a2", "a3", "c2", "c3", "-2", "-3"]


def test_claims_of_one_go_round_the_tenants(alias: str) -> None:
    flood(alias, 5, "b")
    send(alias, "a0", "c0", "a1", "-0")
    found = [text for _ in range(8) for text in texts(claim(alias, 1))]

    assert {text[0] for text in found[:4]} == {"a", "b", "c", "-"}
    for tenant, count in (("a", 2), ("b", 4)):
        assert [text for text in found if text[0] == tenant] == [f"{tenant}{n}" for n in range(count)]


def test_what_a_worker_skips_is_skipped(alias: str) -> None:
    send(alias, "a1", "a2", "b1", "b2")
    seqs = list(Shared.objects.using(alias).order_by("seq").values_list("seq", flat=True))

    ranges = [SeqRange(seqs[1], seqs[1]), SeqRange(seqs[3])]
    assert texts(claim(alias, 9, ranges=ranges)) == ["a2", "b2"]
    assert texts(claim(alias, 9)) == ["a1", "b1"]
    assert claim(alias, 9) == []


@pytest.mark.parametrize("queue", [Shared, SharedTransactional], ids=lambda queue: queue.__name__)
def test_workers_take_turns(no_consumers: None, start_worker: Callable[..., Worker], queue: Any) -> None:
    """A message that was sent last, behind the flood of another tenant, is among the first that are handled."""
    done: list[str] = []
    consumer(queue, name="listed")(done.append)
    flood("default", 1000, queue=queue)
    send("default", "a1", queue=queue)

    start_worker(queue, concurrency=1)

    eventually(lambda: len(done) == 1001)
    assert done.index("a1") < 200
    assert [text for text in done if text[0] == "f"] == [f"f{n}" for n in range(1000)]


@pytest.mark.parametrize("queue", [Shared, SharedTransactional], ids=lambda queue: queue.__name__)
def test_receive_takes_turns(alias: str, queue: Any) -> None:
    flood(alias, 100, queue=queue)
    send(alias, "a1", queue=queue)
    with queue.receive(4, using=alias) as batch:
        assert "a1" in [message.body for message in batch]


# -- the limit of a key ------------------------------------------------------------------------------------------------


def test_a_key_has_at_most_so_many_messages_in_flight(alias: str) -> None:
    flood(alias, 10, "a", LimitedPerKey)
    send(alias, "b1", "-1", "-2", "-3", queue=LimitedPerKey)

    first = claim(alias, 100, LimitedPerKey)
    assert texts(first) == ["a0", "a1", "b1", "-1", "-2", "-3"]
    assert claim(alias, 100, LimitedPerKey) == []

    LimitedPerKey.objects.using(alias).filter(pk=first[0][SEQ]).delete()
    assert texts(claim(alias, 100, LimitedPerKey)) == ["a2"]
    assert claim(alias, 100, LimitedPerKey) == []


def test_a_message_that_is_given_back_or_whose_lease_expires_frees_its_place(alias: str) -> None:
    flood(alias, 3, "a", LimitedPerKey)
    with LimitedPerKey.receive(9, using=alias) as batch:
        assert [message.body for message in batch] == ["a0", "a1"]
        batch[0].cancel()
        assert texts(claim(alias, 9, LimitedPerKey, lease_ms=1)) == ["a0"]
        eventually(lambda: texts(claim(alias, 9, LimitedPerKey)) == ["a0"])


def test_claims_at_the_same_time_do_not_exceed_the_limit(alias: str) -> None:
    for tenant in "abcde":
        flood(alias, 20, tenant, LimitedPerKey)
    found: list[str] = []
    start = threading.Barrier(6)

    def claim_some() -> None:
        try:
            start.wait(30)
            for limit in (3, 7, 100):
                found.extend(texts(claim(alias, limit, LimitedPerKey)))
        finally:
            connections.close_all()

    threads = [threading.Thread(target=claim_some) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert Counter(text[0] for text in found) == dict.fromkeys("abcde", 2)


def test_a_key_at_its_limit_hides_no_other(alias: str, django_assert_max_num_queries: Callable[..., Any]) -> None:
    """Behind so many messages that wait for their key one claim finds that of another one."""
    flood(alias, FLOOD, "a", LimitedPerKey)
    assert len(claim(alias, 100, LimitedPerKey)) == 2
    send(alias, "b1", queue=LimitedPerKey)
    with django_assert_max_num_queries(6, connection=connections[alias]):
        assert texts(claim(alias, 100, LimitedPerKey)) == ["b1"]


def test_a_handler_that_outlives_its_lease_keeps_its_place() -> None:
    """TRANSACTIONAL: as long as its transaction is open."""
    flood("default", 4, "a", LimitedPerKeyTransactional)
    connection = connections["default"]
    sql = queue_sql(LimitedPerKeyTransactional, connection)
    token = new_id()
    rows = sql.claims.claim_by_lease(connection, [SeqRange(0)], 9, token, new_id(), 100)
    assert texts(rows) == ["a0", "a1"]
    found: list[str] = []

    def claim_elsewhere() -> None:
        try:
            # The other lease expires first, and its message is delivered again; then the limit is reached.
            eventually(lambda: found.extend(texts(claim("default", 9, LimitedPerKeyTransactional))) or found)
            found.extend(texts(claim("default", 9, LimitedPerKeyTransactional)))
        finally:
            connections.close_all()

    with transaction.atomic():
        assert sql.acks.ack(connection, [rows[0][SEQ]], token) == 1
        thread = threading.Thread(target=claim_elsewhere)
        thread.start()
        thread.join(60)
        assert found == ["a1"]
    assert texts(claim("default", 9, LimitedPerKeyTransactional)) == ["a2"]


@pytest.mark.parametrize("queue", [LimitedPerKey, LimitedPerKeyTransactional], ids=lambda queue: queue.__name__)
def test_receivers_share_what_a_key_may_have(
    no_consumers: None, start_worker: Callable[..., Worker], delivery: Any, queue: Any
) -> None:
    """Two of four receivers handle it at once, never three; a retry gives its place to the next message."""
    lock, running, peak, failed = threading.Lock(), Counter[str](), Counter[str](), set[str]()
    meet = threading.Event()

    @consumer(queue, name="counted")
    def handle(text: Any) -> None:
        with lock:
            running[text[0]] += 1
            peak[text[0]] = max(peak[text[0]], running[text[0]])
            if running["a"] == 2:
                meet.set()
        try:
            assert meet.wait(30)
            if text in {"a3", "b3"} - failed:
                failed.add(text)
                raise ValueError(text)
        finally:
            with lock:
                running[text[0]] -= 1

    delivery(queue, policy=lambda failure: RetryNow())
    for tenant in "ab":
        flood("default", 8, tenant, queue)
    start_worker(queue, concurrency=4)

    eventually(lambda: not queue.objects.exists())
    assert peak["a"] == 2
    assert peak["b"] <= 2


@pytest.mark.parametrize(
    ("queue", "option"),
    [(LimitedPerKeyTransactional, "max_concurrent_per_key"), (RatedPerKeyTransactional, "rate_per_key")],
)
def test_receive_of_a_transactional_queue_cannot_count(queue: Any, option: str) -> None:
    with pytest.raises(QueueError, match=option):
        queue.receive()


# -- the rate of a key -------------------------------------------------------------------------------------------------


def let_pass(alias: str, **span: float) -> None:
    """So much time has passed for the buckets."""
    KeyTokenBucket.objects.using(alias).update(full_at=F("full_at") - timedelta(**span))


def test_of_a_key_a_burst_is_claimed_and_then_what_its_rate_allows(alias: str) -> None:
    flood(alias, 9, "a", RatedPerKey)
    send(alias, "b1", "-1", "-2", "-3", "-4", queue=RatedPerKey)

    assert texts(claim(alias, 100, RatedPerKey)) == ["a0", "a1", "a2", "b1", "-1", "-2", "-3", "-4"]
    assert claim(alias, 100, RatedPerKey) == []

    send(alias, "b2", "b3", "b4", queue=RatedPerKey)
    let_pass(alias, minutes=9)
    assert texts(claim(alias, 100, RatedPerKey)) == ["b2", "b3"]
    let_pass(alias, minutes=2)
    assert texts(claim(alias, 100, RatedPerKey)) == ["a3", "b4"]
    let_pass(alias, days=1)
    assert texts(claim(alias, 100, RatedPerKey)) == ["a4", "a5", "a6"]


def test_a_claim_says_when_the_next_key_may_be_claimed(alias: str) -> None:
    flood(alias, 9, "a", RatedPerKey)
    turns = queue_sql(RatedPerKey, connections[alias]).claims.turns
    assert turns is not None
    assert len(claim(alias, 100, RatedPerKey)) == 3
    assert turns.held_back_until == 0

    flood(alias, 9, "b", RatedPerKey)
    let_pass(alias, minutes=4)
    assert len(claim(alias, 100, RatedPerKey)) == 3
    assert 350 < turns.held_back_until - monotonic() <= 360


def test_receivers_at_the_same_time_do_not_exceed_a_rate(alias: str) -> None:
    for tenant in "abc":
        flood(alias, 20, tenant, RatedPerKey)
    found: list[str] = []
    start = threading.Barrier(6)

    def receive_some() -> None:
        try:
            start.wait(30)
            for limit in (1, 3, 100):
                with RatedPerKey.receive(limit, using=alias) as batch:
                    found.extend(message.body for message in batch)
        finally:
            connections.close_all()

    threads = [threading.Thread(target=receive_some) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert Counter(text[0] for text in found) == dict.fromkeys("abc", 3)


def test_tokens_of_a_claim_that_is_rolled_back_are_there_again(alias: str) -> None:
    flood(alias, 9, "a", RatedPerKey)
    with transaction.atomic(using=alias):
        assert len(claim(alias, 100, RatedPerKey)) == 3
        transaction.set_rollback(True, using=alias)
    assert len(claim(alias, 100, RatedPerKey)) == 3


def test_buckets_that_are_full_are_deleted(alias: str) -> None:
    send(alias, "a1", "b1", "b2", queue=RatedPerKey)
    assert len(claim(alias, 100, RatedPerKey)) == 3
    let_pass(alias, minutes=12)

    rate_limit.run_maintenance(alias, lambda: True)

    assert list(KeyTokenBucket.objects.using(alias).values_list("queue", "key")) == [("testapp.RatedPerKey", "b")]


@pytest.mark.parametrize("queue", [RatedPerKeyFast, RatedPerKeyTransactional], ids=lambda queue: queue.__name__)
def test_a_worker_handles_in_order_what_a_rate_held_back(
    no_consumers: None, start_worker: Callable[..., Worker], settings: Any, queue: Any
) -> None:
    settings.QUEUEAPP = {"PEEK_DELAY": 3600}
    done: list[str] = []
    consumer(queue, name="listed")(done.append)
    flood("default", 8, "a", queue)

    start_worker(queue, concurrency=1)

    eventually(lambda: len(done) == 8)
    assert done == [f"a{n}" for n in range(8)]


def test_the_kit_knows_no_rate(no_consumers: None, queue_kit: Kit) -> None:
    done: list[str] = []
    consumer(RatedPerKey, name="listed")(done.append)
    flood("default", 8, "a", RatedPerKey)
    queue_kit.drain()
    assert len(done) == 8


# -- weights -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 2, 5, 7, 10])
def test_a_key_gets_as_many_messages_in_a_round_as_its_weight(alias: str, limit: int) -> None:
    for tenant in "abc":
        flood(alias, 60, tenant, Weighted)
    found = [text for _ in range(100 // limit) for text in texts(claim(alias, limit, Weighted))]

    counted = Counter(text[0] for text in found)
    assert abs(counted["b"] - 3 * counted["a"]) <= 3
    assert abs(counted["a"] - counted["c"]) <= 1
    for tenant, count in counted.items():
        assert [text for text in found if text[0] == tenant] == [f"{tenant}{n}" for n in range(count)]


def test_a_turn_goes_on_in_the_next_claim(alias: str) -> None:
    for tenant in "abc":
        flood(alias, 9, tenant, Weighted)
    begin = texts(claim(alias, 1, Weighted))
    while begin[-1][0] != "c":
        begin += texts(claim(alias, 1, Weighted))
    following = [text[0] for _ in range(5) for text in texts(claim(alias, 1, Weighted))]
    assert following == ["a", "b", "b", "b", "c"]


def test_a_turn_ends_with_the_messages_of_its_key(alias: str) -> None:
    send(alias, "a1", "b1", "c1", queue=Weighted)
    turns = queue_sql(Weighted, connections[alias]).claims.turns
    assert turns is not None
    turns.last, turns.units_left = "a", 0
    assert texts(claim(alias, 1, Weighted)) == ["b1"]
    assert (turns.last, turns.units_left) == ("b", 2)
    Weighted.objects.using(alias).exclude(lease_token=None).delete()

    assert sorted(texts(claim(alias, 9, Weighted))) == ["a1", "c1"]
    assert turns.units_left == 0
    turns.units_left = 2
    assert claim(alias, 9, Weighted) == []


def test_a_key_with_a_weight_gets_no_more_than_there_is(alias: str) -> None:
    send(alias, "b1", "a1", "a2", "a3", "a4", queue=Weighted)
    assert sorted(texts(claim(alias, 8, Weighted)) + texts(claim(alias, 8, Weighted))) == ["a1", "a2", "a3", "a4", "b1"]


@pytest.mark.parametrize("weights", [{"b": 0}, {"b": 101}, {"b": 1.5}, {"b": True}, {7: 1}, {"b" * 201: 1}, ["b"]])
def test_what_is_no_weight_is_refused(weights: Any) -> None:
    with pytest.raises(InvalidOption, match="fair_weights"):
        Delivery({"fair_by": "tenant", "fair_weights": weights}, "")


# -- a queue without -------------------------------------------------------------------------------------------------


def test_a_queue_without_keys_has_neither_column_nor_index(alias: str) -> None:
    with connections[alias].cursor() as cursor:
        found = connections[alias].introspection.get_constraints(cursor, Leased._meta.db_table)
    assert not any(name.endswith(("_fair", "_busy")) for name in found)
    assert not queue_sql(Leased, connections[alias]).table.claims_by_key


@pytest.mark.parametrize("header", ["", "x" * 61, "ten'ant", 7])
def test_a_header_is_a_plain_name(header: Any) -> None:
    with pytest.raises(InvalidOption, match="fair_by"):
        Delivery({"fair_by": header}, "")
