"""How many messages a receive task leases at once follows from how long its handlers take."""

from __future__ import annotations

import pytest

from workers.receiving.sizing import BatchSize

TARGET = 0.08


def after(batches: int, seconds_per_message: float, limit: int = 500) -> int:
    """The size after so many full batches of handlers that take so long."""
    size = BatchSize(limit, TARGET)
    for _ in range(batches):
        size.observe(size.n, size.n * seconds_per_message)
    return size.n


def test_begins_with_one() -> None:
    assert BatchSize(500, TARGET).n == 1


def test_fast_handlers_double_it_up_to_the_limit() -> None:
    assert [after(batches, 0.00001) for batches in range(11)] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 500, 500]


@pytest.mark.parametrize(("seconds", "settled"), [(0.001, 80), (0.02, 4), (0.08, 1), (1.0, 1)])
def test_settles_where_a_batch_takes_the_target(seconds: float, settled: int) -> None:
    assert after(40, seconds) == pytest.approx(settled, abs=max(1, settled // 10))


def test_one_slow_batch_shrinks_it_at_once() -> None:
    size = BatchSize(500, TARGET)
    for _ in range(12):
        size.observe(size.n, size.n * 0.00001)
    assert size.n == 500

    size.observe(500, 500 * 0.04)

    assert size.n == 2


def test_a_batch_that_was_not_full_says_nothing_about_a_bigger_one() -> None:
    size = BatchSize(500, TARGET)
    size.observe(1, 0.00001)
    assert size.n == 2

    size.observe(1, 0.00001)

    assert size.n == 2


def test_handlers_that_take_no_time_at_all_are_no_division_by_zero() -> None:
    size = BatchSize(500, TARGET)

    size.observe(1, 0.0)

    assert size.n == 2
