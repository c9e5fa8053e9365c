"""How the workers of one queue share a small backlog, so that not all of them receive in vain."""

from __future__ import annotations

import threading
from time import monotonic
from typing import Any

import pytest

from queueapp.sql.claims import PeekResult
from tests.in_process_worker import real_commits
from tests.testapp.models import Leased
from workers.receiving.pump import QueuePump, queue_position, share_of_backlog
from workers.receiving.receivers import AtLeastOnceReceiver

pytestmark = [real_commits, pytest.mark.usefixtures("no_consumers")]


def idle_pump(**options: Any) -> QueuePump:
    """A pump that nobody runs."""
    return QueuePump(Leased, "default", stopping=threading.Event(), **options)


@pytest.mark.parametrize("waiting", [1, 2, 5, 7])
@pytest.mark.parametrize("first", [1, 2, 3, 1000])
def test_of_many_workers_as_many_take_part_as_there_are_messages(waiting: int, first: int) -> None:
    parts = [share_of_backlog(waiting, first, rank, 8) for rank in range(8)]
    places = [queue_position(first, rank, 8) for rank in range(8)]

    assert parts.count(1) == waiting
    assert sorted(place for place, part in zip(places, parts, strict=True) if not part) == list(range(waiting, 8)), (
        "the others come one after the other"
    )


@pytest.mark.parametrize("waiting", [8, 9, 16, 23, 100])
@pytest.mark.parametrize("first", [1, 6])
def test_the_parts_of_all_workers_add_up_to_a_small_backlog(waiting: int, first: int) -> None:
    parts = [share_of_backlog(waiting, first, rank, 8) for rank in range(8)]

    assert sum(parts) == waiting
    assert max(parts) - min(parts) <= 1


def calls_of(one: QueuePump, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int | None]]:
    """What a pump calls for: (tasks, messages of each)."""
    calls: list[tuple[int, int | None]] = []

    def call(tasks: int, messages: int | None = None) -> int:
        calls.append((tasks, messages))
        return tasks

    monkeypatch.setattr(one.pool, "submit", call)
    return calls


def test_a_large_backlog_is_for_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    one = idle_pump(concurrency=4)
    one.workers, one.rank = 8, 5
    monkeypatch.setattr(one, "peek", lambda: PeekResult(1000, 0, 8))
    calls = calls_of(one, monkeypatch)

    one.peek_and_submit()

    assert calls == [(4, None)]


def test_a_message_that_nobody_took_in_turn_is_taken_by_whoever_looks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    one = idle_pump()
    one.workers, one.rank = 8, 5
    looks: list[PeekResult] = []

    def peek() -> PeekResult:
        looks.append(PeekResult(1, 0, 8))
        return looks[-1]

    monkeypatch.setattr(one, "peek", peek)
    calls = calls_of(one, monkeypatch)

    one.peek_and_submit()

    assert len(looks) == 2, "the first look said that it was the turn of others"
    assert calls == [(1, 1)]


def test_what_is_promised_to_tasks_at_work_is_not_given_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    one = idle_pump()
    monkeypatch.setattr(one, "peek", lambda: PeekResult(6, 0, 1))
    calls = calls_of(one, monkeypatch)
    at_work = AtLeastOnceReceiver(one.state, None)
    at_work.share, at_work.share_at = 5, monotonic()
    one.pool.receivers = [at_work]

    one.peek_and_submit()

    assert calls == [(1, 1)]
