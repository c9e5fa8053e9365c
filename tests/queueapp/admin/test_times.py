"""Times are shown as times of the site, to be read without a mouse, also where a message tells them of itself."""

import json
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.test import Client

from queueapp.admin.formatting import display
from queueapp.models import DelayedMessage, PoisonMessage
from tests.testapp.models import Leased

from .conftest import notes, url
from .test_poison import poison


@pytest.fixture(autouse=True)
def in_oslo(settings: Any) -> None:
    settings.TIME_ZONE = "Europe/Oslo"


@pytest.mark.parametrize(
    ("reported", "shown"),
    [
        ("2026-07-20T10:11:12.345678+00:00", ">2026-07-20 12:11:12</time>"),
        ("2026-07-20T10:11:12", ">2026-07-20 12:11:12</time>"),
        ("2026-02-30T10:11:12+00:00", ">2026-02-30T10:11:12+00:00</bdi>"),
        ("9999-12-31T23:59:59-12:00", ">9999-12-31T23:59:59-12:00</bdi>"),
        ("<script>", ">&lt;script&gt;</bdi>"),
        ("", "></bdi>"),
        (None, "></bdi>"),
        (7, ">7</bdi>"),
    ],
)
def test_the_time_of_a_failed_attempt(operator: Client, reported: Any, shown: str) -> None:
    assert shown in display.moment_of_text(reported)
    (number,) = poison(failures=json.dumps([{"at": reported, "attempt": 1, "exception": "E", "verdict": "RetryNow"}]))
    page = operator.get(url(PoisonMessage, "change", number)).content.decode()
    assert f'data-label="At">{display.moment_of_text(reported)}</td>' in page
    assert 'data-label="Then">retried at once</td>' in page


def test_a_span_that_was_set_is_not_rounded() -> None:
    assert display.in_full(timedelta(days=1, seconds=30)) == "1 d 30 s"
    assert display.in_full(timedelta(hours=2, minutes=3, milliseconds=4)) == "2 h 3 min 4 ms"
    assert display.in_full(timedelta(0)) == "0 s"


def test_an_age_shows_its_time(operator: Client) -> None:
    (number,) = poison()
    PoisonMessage.objects.filter(pk=number).update(failed_at="2026-07-20T10:11:12Z")
    assert ">2026-07-20 12:11:12</time>" in operator.get(url(PoisonMessage)).content.decode()


def test_a_due_time_is_shown(operator: Client) -> None:
    DelayedMessage.objects.create(message_id="0" * 32, destination="testapp.Leased", due="2030-07-20T10:11:12Z")
    assert ">2030-07-20 12:11:12</time>" in operator.get(url(DelayedMessage)).content.decode()


END_OF_TIME = "9999-12-31T23:59:59+00:00"


@pytest.mark.parametrize("field", ["expires", "enqueued_at", "lease_expires"])
def test_a_time_that_has_no_turn_in_the_zone_of_the_site(operator: Client, field: str) -> None:
    """Senders write the greatest time there is for "never"; in Oslo that is in the year 10000."""
    Leased.send({})
    Leased.objects.update(**{field: END_OF_TIME})
    assert operator.get(url(Leased)).status_code == 200
    assert END_OF_TIME in operator.get(url(Leased, "change", Leased.objects.get().pk)).content.decode()


def test_a_delay_until_the_end_of_time(operator: Client) -> None:
    Leased.send({}, delay=timedelta(hours=1))
    DelayedMessage.objects.update(due=END_OF_TIME)
    assert END_OF_TIME in operator.get(url(DelayedMessage)).content.decode()
    assert END_OF_TIME in operator.get(url(DelayedMessage, "change", DelayedMessage.objects.get().pk)).content.decode()


@pytest.mark.skipif(connection.vendor != "postgresql", reason="SQL Server has no such times")
@pytest.mark.parametrize("at", ["infinity", "-infinity", "20000-01-01 00:00+00"])
def test_a_time_that_the_driver_cannot_read_is_a_note(operator: Client, at: str) -> None:
    Leased.send({})
    with connection.cursor() as cursor:
        cursor.execute("UPDATE testapp_leased SET expires = %s::timestamptz", [at])
    pk = Leased._base_manager.values_list("pk", flat=True).get()
    for page in (url(Leased), url(Leased, "change", pk), url(Leased, "body", pk)):
        (note,) = notes(operator.get(page, follow=True))
        assert note.startswith("Queue testapp.Leased: a value in the table 'testapp_leased' cannot be read: timestamp")
