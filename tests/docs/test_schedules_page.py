"""The page of schedules: its blocks run, and what they declare is written and sent."""

from __future__ import annotations

import sys
from datetime import timedelta
from types import ModuleType
from typing import Any

import pytest

from queueapp.models import Schedule
from queueapp.schedules import declarations, stored
from tests.queueapp.contrib.tasks.declared import add

from .pages import DOCS
from .running import run_blocks

PAGE = DOCS / "howto/schedules.md"


@pytest.mark.django_db(transaction=True)
def test_what_the_page_declares_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(declarations, "declared", {})
    tasks: Any = ModuleType("shop.tasks")
    tasks.send_bill = add
    monkeypatch.setitem(sys.modules, "shop", ModuleType("shop"))
    monkeypatch.setitem(sys.modules, "shop.tasks", tasks)

    with run_blocks(PAGE) as module:
        stored.declare("default")
        rows = {row.name: row for row in Schedule.objects.all()}
        assert set(rows) == {"tests.guide_app.models.nightly", "short report", "close the year", "monthly bill"}
        for row in rows.values():
            if row.due_at is not None:
                assert stored.run_one("default", row.name, row.due_at) == 1
        stored.run_now("default", "tests.guide_app.models.nightly")

        assert module.Reports.objects.count() >= 3


def test_a_time_with_seconds_that_is_missing_in_spring_does_not_run() -> None:
    from queueapp.schedules.timing import EPOCH, Timing

    timing = Timing(cron="0 30 2 * * *", timezone="Europe/Oslo")
    before = EPOCH.replace(year=2026, month=3, day=28, hour=12)

    assert timing.after(before) - before > timedelta(days=1)
