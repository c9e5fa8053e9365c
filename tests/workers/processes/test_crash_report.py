"""Accounting for dead processes while the database is away: nothing is forgotten, and the log is not filled."""

from __future__ import annotations

import pytest
from django.db import OperationalError

from queueapp.circuit_breaker import CircuitBreaker, State
from workers.processes import crash_recovery
from workers.processes.crash_recovery import CrashReport, record


def test_a_crash_that_cannot_be_written_down_is_kept_and_tried_again_after_a_while(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, db: None
) -> None:
    first, second = CrashReport([], [], "was killed"), CrashReport([], [], "was killed, too")
    breaker = CircuitBreaker("Accounting for crashes")
    answers = False

    def write_down(crash: CrashReport) -> None:
        if not answers and crash is first:
            raise OperationalError("away")

    monkeypatch.setattr(crash_recovery, "record_crash", write_down)
    monkeypatch.setattr(crash_recovery.connections, "close_all", lambda: None)  # the test's own transaction

    remaining = [first, second]
    for _ in range(100):
        remaining, wait = record(remaining, breaker)
        assert (remaining, wait) == ([first], 1.0)
    assert len(caplog.records) == 1

    answers = True
    assert record(remaining, breaker) == ([], 0.0)
    assert breaker.state is State.CLOSED
