"""Two dispatchers at once that are killed again and again: each time of each schedule is sent exactly once."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import IO

import pytest
from django.db import connection, transaction

from queueapp.messages import decode_headers
from queueapp.models import Schedule
from queueapp.schedules import stored
from queueapp.schedules.timing import Timing
from queueapp.sql import backend_of
from tests.in_process_worker import DEADLINE, eventually, real_commits
from tests.testapp.models import Leased

pytestmark = [real_commits, pytest.mark.timeout(900)]

CHECKOUT = Path(__file__).parents[3]
#: Simulated seconds per second: 300 minutes in 12 s.
FACTOR = 1500
#: Times of the schedule of each minute, beyond the hour in which the clocks change; one dispatcher is killed every 50.
TIMES = int(os.environ.get("QUEUEAPP_SCHEDULE_TIMES", "300"))


class Dispatchers:
    """Two processes, each of which is started anew after it was killed."""

    def __init__(self, environment: dict[str, str], base: datetime, log: IO[bytes]) -> None:
        self._environment, self._log = environment, log
        self._arguments = [base.isoformat(), backend_of(connection).now(connection).isoformat(), str(FACTOR)]
        self.running = [self._start(number) for number in (0, 1)]

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.queueapp.schedules.dispatching", f"d{number}", *self._arguments]
        return subprocess.Popen(command, cwd=CHECKOUT, env=self._environment, stdout=self._log, stderr=self._log)

    def kill(self, number: int) -> None:
        """Kill one and start it anew."""
        self.running[number].kill()
        self.running[number].wait(DEADLINE)
        self.running[number] = self._start(number)

    def stop(self) -> None:
        for item in self.running:
            item.kill()
            item.wait(DEADLINE)


def sent() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for text in Leased.objects.order_by("seq").values_list("headers", flat=True):
        headers = decode_headers(text)
        found.setdefault(headers["schedule"], []).append(headers["scheduled-for"])
    return found


@pytest.mark.parametrize(
    ("base", "zone"),
    [
        pytest.param(datetime(2026, 3, 28, 21, 30, tzinfo=UTC), "Europe/Oslo", id="the clocks go forward"),
        pytest.param(datetime(2026, 10, 24, 21, 30, tzinfo=UTC), "Europe/Oslo", id="the clocks go back"),
    ],
)
def test_each_time_is_sent_once_under_two_dispatchers_and_kills(
    base: datetime, zone: str, child_environment: dict[str, str], tmp_path: Path
) -> None:
    day = timedelta(days=1)
    timings = {
        "each minute": Timing(cron="* * * * *", timezone=zone),
        "each hour": Timing(cron="0 * * * *", timezone=zone),
        "every 7 minutes": Timing(every=timedelta(minutes=7)),
        "at half past two": Timing(cron="30 2 * * *", timezone=zone),
        "once": Timing(at=base + timedelta(hours=3, minutes=3)),
    }
    for name, timing in timings.items():
        first = timing.after(base)
        Schedule.objects.create(
            name=name, queue="testapp.Leased", cron=timing.cron, every=timing.every, at=timing.at,
            timezone=timing.timezone, misfire="all", misfire_limit=10_000, misfire_grace=10 * day,
            next_at=first, due_at=first,
        )  # fmt: skip
    chance = random.Random(1)
    with (tmp_path / "log").open("wb") as log:
        dispatchers = Dispatchers(child_environment, base, log)
        try:
            minutes = Leased.objects.filter(headers__contains='"each minute"')
            for times in range(50, TIMES, 50):
                eventually(lambda times=times: minutes.count() >= times, 4 * DEADLINE)
                dispatchers.kill(chance.randrange(2))
            eventually(lambda: minutes.count() >= TIMES, 4 * DEADLINE)
        finally:
            dispatchers.stop()

    # The last transaction of a killed process may be committed only now: messages and rows are read as of one moment.
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute("SET TRANSACTION ISOLATION LEVEL SERIALIZABLE")
        found, rows = sent(), Schedule.objects.in_bulk(field_name="name")
    output = (tmp_path / "log").read_text()
    for name, timing in timings.items():
        row = rows[name]
        until = row.next_at or base + 2 * day
        expected = []
        for moment in timing.times(base):
            if moment >= until:
                break
            expected.append(moment.isoformat())
        assert Counter(found.get(name, [])) == Counter(expected), output
        assert (row.runs, row.failures) == (len(expected), 0), row.error
    assert len(found["at half past two"]) == 1
    assert len(found["once"]) == 1
    assert stored.clock(connection) > base
