"""The demo's maintenance: what is old goes, and a worker of Celery's does it."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from django.utils import timezone

from project.celery import app
from project.flights.demo import maintenance
from project.flights.models import Import, Rebooking
from project.flights.tasks import KEPT, trim
from tests.project.flights.commands import command


def rows() -> None:
    Rebooking.objects.create(flight="new", minutes=1)
    for number in range(3):
        Rebooking.objects.create(flight=f"old {number}", minutes=1)
    Rebooking.objects.filter(flight__startswith="old").update(rebooked_at=timezone.now() - KEPT - timedelta(days=1))
    Import.objects.create(note="new", message_id="0f9619ff-8b86-d011-b42d-00c04fc964ff")


@pytest.mark.django_db
def test_what_is_old_is_trimmed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("project.flights.tasks.BATCH", 2)
    rows()

    assert trim() == 3

    assert [*Rebooking.objects.values_list("flight", flat=True)] == ["new"]
    assert Import.objects.count() == 1


@pytest.mark.django_db(transaction=True)
@pytest.mark.timeout(120)
def test_a_worker_of_celery_does_it(child_environment: dict[str, str], tmp_path: Path) -> None:
    rows()
    with command("runcelery", "worker", environment=child_environment, folder=tmp_path):
        assert trim.delay().get(timeout=60) == 3

    assert Rebooking.objects.count() == 1


def test_the_clock_knows_the_task() -> None:
    app.loader.import_default_modules()
    assert {item["task"] for item in app.conf.beat_schedule.values()} <= {*app.tasks}
    assert maintenance.trim.name == trim.name
