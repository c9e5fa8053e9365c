"""``manage.py schedules``: lists, checks and operates."""

from __future__ import annotations

import json
from datetime import timedelta
from io import StringIO
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from queueapp.models import Now, Schedule
from queueapp.schedules import declarations, stored
from tests.testapp.models import Leased

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def no_declarations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(declarations, "declared", {})


def schedules(*arguments: str) -> str:
    output = StringIO()
    call_command("schedules", *arguments, stdout=output)
    return output.getvalue()


@pytest.fixture
def two() -> None:
    Leased.schedule({}, name="nightly", cron="0 3 * * *", timezone="Europe/Oslo", tags=["reports"])
    stored.declare("default")
    row = Schedule(name="often", queue="testapp.Leased", every=timedelta(minutes=5))
    stored.plan(row, "default")
    row.save()


def test_the_list(two: None) -> None:
    lines = schedules().splitlines()

    assert len(lines) == 2
    assert lines[0].startswith("nightly: 0 3 * * * Europe/Oslo -> testapp.Leased; next: ")
    assert lines[1].startswith("often: every 0:05:00 -> testapp.Leased; next: ")
    assert schedules("--tag", "reports").splitlines() == lines[:1]


def test_the_list_as_json_with_the_next_ten_times(two: None) -> None:
    nightly, often = json.loads(schedules("--json", "--next", "10"))

    assert (nightly["name"], nightly["source"], nightly["tags"], nightly["problem"]) == (
        "nightly", "code", ["reports"], None,
    )  # fmt: skip
    assert (often["source"], len(often["next"]), often["next"]) == ("admin", 10, sorted(often["next"]))


def test_operations(two: None) -> None:
    assert schedules("often", "--pause") == "1 schedule paused.\n"
    assert "next: paused" in schedules("often")
    assert schedules("often", "--resume") == "1 schedule resumed.\n"
    assert schedules("--tag", "reports", "--run", "--json") == '{"run": 1}\n'
    assert Leased.objects.count() == 1

    with pytest.raises(CommandError, match="needs the names"):
        schedules("--pause")
    with pytest.raises(CommandError, match="no schedule 'unknown'"):
        schedules("unknown")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"cron": "nonsense", "every": None}, "cron of a schedule"),
        ({"queue": "shop.Gone"}, "no queue 'shop.Gone'"),
        ({"options": '{"priority": 7}'}, "priority = 7"),
        ({"due_at": Now() - timedelta(hours=1)}, "late: it was due"),
        ({"failures": 3, "error": "no disk"}, "3 failed runs in a row: no disk"),
    ],
)
def test_the_check_names_what_cannot_run(two: None, changes: dict[str, Any], problem: str) -> None:
    assert schedules("--check") == "No problems.\n"
    Schedule.objects.filter(name="often").update(**changes)
    output = StringIO()

    with pytest.raises(CommandError, match="1 schedule cannot run"):
        call_command("schedules", "--check", stdout=output)

    assert output.getvalue().startswith("often: ")
    assert problem in output.getvalue()


def test_the_check_names_what_no_dispatcher_has_written() -> None:
    Leased.schedule({}, name="nightly", cron="0 3 * * *")
    output = StringIO()

    with pytest.raises(CommandError):
        call_command("schedules", "--check", stdout=output)

    assert "nightly: declared in the code, and not in the database" in output.getvalue()
