"""What a healthy worker says of itself."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from queueapp import consumer
from tests.in_process_worker import Worker, eventually, real_commits
from tests.testapp.messages import Nop
from tests.testapp.models import Leased, Urgent
from workers.processes.child import StatsLog

pytestmark = [real_commits, pytest.mark.usefixtures("no_consumers")]


def test_one_line_states_what_was_done_since_the_last_one(
    start_worker: Callable[..., Worker], caplog: pytest.LogCaptureFixture
) -> None:
    def act(message: Nop) -> None:
        if message.number == 3:
            raise ValueError

    consumer(Leased, name="tests", attempts=1)(act)
    pumps = [start_worker(Leased).pump, start_worker(Urgent).pump]
    pumps[1].paused = True
    report = StatsLog(pumps)
    Leased.send_many(Nop(number, "") for number in range(5))
    eventually(lambda: pumps[0].stats.handled == 4 and pumps[0].stats.failed == 1)
    caplog.set_level(logging.INFO, logger="queueapp.workers")

    report.log_interval()
    report.log_interval()

    first, second = (record.getMessage() for record in caplog.records if " in 60 s: " in record.getMessage())
    assert first.endswith("in 60 s: testapp.Leased 4 handled, 1 failed; testapp.Urgent 0 handled (paused).")
    assert second.endswith("in 60 s: testapp.Leased 0 handled; testapp.Urgent 0 handled (paused).")
