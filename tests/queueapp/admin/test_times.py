"""Times are shown as times of the site, to be read without a mouse, also where a message tells them of itself."""

import json
from typing import Any

import pytest
from django.test import Client

from queueapp.admin.showing import display
from queueapp.models import DelayedMessage, PoisonMessage

from .conftest import url
from .test_poison import poison


@pytest.fixture(autouse=True)
def in_oslo(settings: Any) -> None:
    settings.TIME_ZONE = "Europe/Oslo"


@pytest.mark.parametrize(
    ("told", "shown"),
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
def test_the_time_of_a_failed_attempt(operator: Client, told: Any, shown: str) -> None:
    assert shown in display.told_moment(told)
    (number,) = poison(failures=json.dumps([{"at": told, "attempt": 1, "exception": "E", "verdict": "RetryNow"}]))
    page = operator.get(url(PoisonMessage, "change", number)).content.decode()
    assert f'data-label="At">{display.told_moment(told)}</td>' in page


def test_an_age_says_when_that_was(operator: Client) -> None:
    (number,) = poison()
    PoisonMessage.objects.filter(pk=number).update(failed_at="2026-07-20T10:11:12Z")
    assert ">2026-07-20 12:11:12</time>" in operator.get(url(PoisonMessage)).content.decode()


def test_what_is_due_says_when(operator: Client) -> None:
    DelayedMessage.objects.create(message_id="0" * 32, destination="testapp.Leased", due="2030-07-20T10:11:12Z")
    assert ">2030-07-20 12:11:12</time>" in operator.get(url(DelayedMessage)).content.decode()
