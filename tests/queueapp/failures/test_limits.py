"""When a message that was claimed is not to be handled: every count with its own limit."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from queueapp.failures.history import append, attempts_of, reset_attempts
from queueapp.failures.limits import LimitReached, attempt_of, check_limits, reached, unacknowledged_deliveries
from queueapp.sql.claims import Claimed


def claimed(deliveries: int, cancels: int = 0, failed: int = 0, headers: str = "{}") -> Claimed:
    history = None
    for attempt in range(failed):
        history = append(history, ValueError(), attempt + 1, "RetryNow")
    return (1, b"", headers, b"", deliveries, cancels, history)


def limits(deliveries: int = 0, cancels: int = 0) -> Any:
    return SimpleNamespace(max_deliveries=deliveries, max_cancels=cancels)


def verdict(message: Claimed, attempts: int, delivery: Any = None, *, leased: bool = True) -> str | None:
    attempt = attempt_of(message, keeps_counts=True)
    found = check_limits(message, attempt, attempts, delivery or limits(), leased=leased)
    assert found is None or isinstance(found, LimitReached)
    return None if found is None else str(found)


def test_a_message_is_handled_until_it_has_failed_so_often() -> None:
    assert verdict(claimed(3, failed=2), 3) is None
    assert verdict(claimed(4, failed=3), 3) == "It failed 3 of 3 attempts; its handler is not run again."


def test_counts_that_do_not_add_up_take_no_attempt_away() -> None:
    """As those of a message that was edited, or written by a foreign writer."""
    assert unacknowledged_deliveries(claimed(1, cancels=3, failed=2), 3, leased=True) == 0


def test_what_was_given_back_on_purpose_is_no_attempt() -> None:
    assert verdict(claimed(100, cancels=99), 1) is None
    assert verdict(claimed(100, cancels=99), sys.maxsize) is None


@pytest.mark.parametrize(("attempts", "limit"), [(1, 3), (2, 4), (3, 5), (7, 9)])
def test_unacknowledged_deliveries_are_no_attempts_and_are_limited(attempts: int, limit: int) -> None:
    assert verdict(claimed(limit), attempts) is None
    assert verdict(claimed(limit + 1), attempts) == (
        f"It was handed out {limit} times and never ended; its handler is not run again."
    )


def test_with_a_policy_the_attempts_of_the_project_limit_unacknowledged_deliveries(settings: Any) -> None:
    settings.QUEUEAPP = {"ATTEMPTS": 4}
    assert verdict(claimed(6), sys.maxsize) is None
    assert verdict(claimed(7), sys.maxsize) is not None
    assert verdict(claimed(104, failed=100), sys.maxsize) is None, "those that failed are the policy's"


def test_every_hand_out_counts_for_the_limit_of_deliveries() -> None:
    assert verdict(claimed(3, cancels=2), 9, limits(3)) is None
    assert verdict(claimed(4, cancels=3), 9, limits(3)) == "max_deliveries: handed out 3 times"
    assert verdict(claimed(2, failed=2), 9, limits(3), leased=False) is None
    assert verdict(claimed(3, failed=3), 9, limits(3), leased=False) == "max_deliveries: handed out 3 times"


def test_no_limit_is_none() -> None:
    assert reached(limits(), 10**6, 10**6) == ()
    assert reached(limits(2, 2), 1, 1) == ()


def test_all_limits_that_are_reached_are_named_in_one_order() -> None:
    assert reached(limits(2, 2), 2, 2) == ("max_cancels", "max_deliveries")
    assert reached(limits(2, 3), 2, 2) == ("max_deliveries",)


def test_a_foreign_table_counts_in_the_headers() -> None:
    message = claimed(0, headers='{"queueapp.Attempts":"2"}')
    assert attempt_of(message, keeps_counts=False) == 3
    assert attempt_of(claimed(0, headers='{"queueapp.Attempts":"x"}'), keeps_counts=False) == 1


@pytest.mark.parametrize(
    "history", ["", "7", "{}", "[1]", '[{"attempt":"2"}]', '[{"attempt":-3}]', "[" * 9999, "\ud800"]
)
def test_a_history_that_does_not_report_is_of_no_attempt(history: str) -> None:
    assert attempts_of(history) == 0


def test_a_long_history_and_one_that_was_set_back_still_count() -> None:
    history = claimed(0, failed=50)[6]
    assert attempts_of(history) == 50
    assert attempts_of(reset_attempts(history, 2)) == 2
    assert attempts_of(append(reset_attempts(history, 2), ValueError(), 3, "Poison")) == 3
