"""How many messages a receiver claims at once: by the time of their handlers, and by the size of their bodies."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from queueapp import consumer
from queueapp.conf import settings as queueapp_settings
from queueapp.sql.claims import BODY, Claimed
from tests.in_process_worker import Worker, eventually, real_commits
from tests.testapp.models import AtMostOnce, Leased
from workers.receiving.limits import BatchSizer
from workers.receiving.queue_state import QueueState

TARGET = 0.08


def after(batches: int, seconds_per_message: float, limit: int = 500) -> int:
    """The size after so many full batches of handlers that take so long."""
    size = BatchSizer(limit, TARGET)
    for _ in range(batches):
        size.observe(size.n, size.n * seconds_per_message)
    return size.n


def test_begins_with_one() -> None:
    assert BatchSizer(500, TARGET).n == 1


def test_fast_handlers_double_it_up_to_the_limit() -> None:
    assert [after(batches, 0.00001) for batches in range(11)] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 500, 500]


@pytest.mark.parametrize(("seconds", "settled"), [(0.001, 80), (0.02, 4), (0.08, 1), (1.0, 1)])
def test_settles_where_a_batch_takes_the_target(seconds: float, settled: int) -> None:
    assert after(40, seconds) == pytest.approx(settled, abs=max(1, settled // 10))


def test_one_slow_batch_shrinks_it_at_once() -> None:
    size = BatchSizer(500, TARGET)
    for _ in range(12):
        size.observe(size.n, size.n * 0.00001)
    assert size.n == 500

    size.observe(500, 500 * 0.04)

    assert size.n == 2


def test_a_batch_that_was_not_full_reports_nothing_about_a_bigger_one() -> None:
    size = BatchSizer(500, TARGET)
    size.observe(1, 0.00001)
    assert size.n == 2

    size.observe(1, 0.00001)

    assert size.n == 2


LIMIT = 1_000_000


def rows(*sizes: int | None) -> list[Claimed]:
    """Claimed messages with bodies of so many bytes; None: without one."""
    return [(seq, b"", "{}", None if size is None else b"x" * size, 1) for seq, size in enumerate(sizes)]


def claims(sizes: Iterable[int], batches: int) -> list[int]:
    """The bytes of so many full claims from a backlog of bodies of these sizes, by a task whose handlers take no
    time."""
    size, remaining, weights = BatchSizer(500, TARGET, LIMIT), iter(sizes), []
    for _ in range(batches):
        claimed = rows(*itertools.islice(remaining, size.n))
        weights.append(sum(len(row[BODY]) for row in claimed))
        size.weigh(claimed)
        assert size.n >= 1
        size.observe(len(claimed), 0.0)
    return weights


@pytest.mark.parametrize("size", [1_000, 3_000, 33_333, 499_999])
def test_bodies_of_one_size_stay_within_the_limit_from_the_first_claim_on(size: int) -> None:
    weights = claims(itertools.repeat(size), 40)

    assert max(weights) <= LIMIT
    assert weights[-1] > LIMIT - 2 * size or weights[-1] == 500 * size, "and use it"


def test_one_message_is_claimed_however_large_it_is() -> None:
    assert claims(itertools.repeat(7 * LIMIT), 3) == [7 * LIMIT] * 3


def test_when_bodies_become_larger_one_claim_is_over_the_limit_by_that_factor_and_no_more_follow() -> None:
    weights = claims(itertools.chain(itertools.repeat(5_000, 1_000), itertools.repeat(50_000)), 30)

    over = [weight for weight in weights if weight > LIMIT]
    assert len(over) <= 2, "the larger ones may begin in the middle of a claim"
    assert max(over, default=0) <= 10 * LIMIT


def test_when_bodies_become_smaller_claims_grow_again() -> None:
    weights = claims(itertools.chain(itertools.repeat(900_000, 3), itertools.repeat(1_000)), 40)

    assert weights[-1] == 500_000


def test_a_claim_shrinks_before_its_handlers_have_ended() -> None:
    size = BatchSizer(500, TARGET, LIMIT)
    size.n = 400

    size.weigh(rows(100_000, 100_000))

    assert size.n == 10


def test_messages_without_a_body_weigh_nothing() -> None:
    size = BatchSizer(500, TARGET, LIMIT)
    size.weigh(rows(None, None))
    size.observe(1, 0.0)
    assert size.n == 2

    size.weigh(rows(None, 600_000))
    size.observe(2, 0.0)

    assert size.n == 3


def test_handlers_that_take_no_time_at_all_are_no_division_by_zero() -> None:
    size = BatchSizer(500, TARGET)

    size.observe(1, 0.0)

    assert size.n == 2


@real_commits
@pytest.mark.usefixtures("no_consumers")
@pytest.mark.parametrize("queue", [Leased, AtMostOnce])
def test_a_backlog_of_155_megabytes_is_claimed_in_bounded_batches(
    start_worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch, queue: Any
) -> None:
    item, count = 310_000, 500
    claims: list[int] = []
    handled: list[int] = []
    claimed = QueueState.claimed

    def weighing(self: QueueState, rows: Any, full: bool) -> None:
        claims.append(sum(len(row[BODY]) for row in rows))
        claimed(self, rows, full)

    @consumer(queue, name="tests")
    def handler(message: bytes) -> None:
        handled.append(len(message))

    monkeypatch.setattr(QueueState, "claimed", weighing)
    body = b"x" * item
    queue.send_many(body for _ in range(count))
    start_worker(queue, concurrency=2)

    eventually(lambda: len(handled) == count)
    eventually(lambda: not queue.objects.exists())

    assert sum(claims) == item * count == 155_000_000
    assert max(claims) <= queueapp_settings.MAX_BATCH_BYTES == 16 * 2**20
    assert max(claims) > item, "and not one by one"
