"""What the overview says below a queue: what hangs, what fails, and who floods it."""

import json
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.utils.html import strip_tags

from queueapp.admin import overview_findings
from queueapp.models import Now, PoisonMessage, QueueControl, QueueSnapshot, Subscriber
from queueapp.sql import backend_of
from tests.testapp.messages import Ping
from tests.testapp.models import Leased, Shared

from .conftest import url

LABEL = "testapp.Leased"


def snapshot(label: str = LABEL, **figures: Any) -> None:
    """A point of the queue's history, half a minute old."""
    at = backend_of(connection).now(connection) - timedelta(seconds=30)
    QueueSnapshot.objects.create(queue=label, period=60, at=at, seconds=60, **figures)


def worker(label: str = LABEL, **columns: Any) -> None:
    Subscriber.objects.create(
        queue=label, host="w-1", process=7, supervisor=uuid.uuid4(), alive_until=Now() + timedelta(hours=1), **columns
    )


def shown(client: Client, label: str = LABEL) -> tuple[str, list[str]]:
    """State of a queue, and the lines below it, on the overview."""
    lines = client.get(url(QueueControl)).context["lines"]
    found = next(line for line in lines if line["row"].label == label)
    return strip_tags(found["state"]), [str(note).replace("<wbr>", "") for note in found["notes"]]


def poison(number: int, **columns: Any) -> None:
    for _ in range(number):
        PoisonMessage.objects.create(message_id=uuid.uuid4(), queue=LABEL, **columns)


def test_a_queue_whose_attempts_fail_says_what_fails_since_when_and_on_which_version(operator: Client) -> None:
    snapshot(poison=0, handled=60, failed=60)
    worker()
    poison(3, reason="failed 2 of 2 attempts: KeyError: 'vat_rate'", consumer="shop.bill", worker_version="2026.11.29")
    state, (note,) = shown(operator)
    assert state == "failing"
    text = strip_tags(note)
    assert "shop.bill: failed 2 of 2 attempts: KeyError: &#x27;vat_rate&#x27; (3 since " in text
    assert ", all on version 2026.11.29)" in text
    assert f'<a href="{url(PoisonMessage)}?queue={LABEL}">Poison messages</a>' in note


def test_poison_of_before_the_hour_and_of_several_versions_is_not_blamed_on_a_deploy(operator: Client) -> None:
    snapshot(poison=1, handled=60)
    poison(1, reason="old")
    assert shown(operator)[1] == [], "nothing is new"
    poison(1, reason="new <b>", worker_version="1")
    poison(1, reason="newest", worker_version="2")
    (note,) = shown(operator)[1]
    assert "newest (3 since " in strip_tags(note)
    assert "all on version" not in note


def test_a_failing_queue_is_failing_on_its_own_page_too(operator: Client) -> None:
    snapshot(poison=0, handled=60, failed=60)
    worker()
    for span in ("1h", "7d"):
        page = operator.get(url(QueueControl, "charts", LABEL), {"span": span})
        assert strip_tags(page.context["line"]["state"]) == "failing"


def test_poison_of_many_errors_is_counted_among_the_newest(operator: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overview_findings, "NEWEST_POISON", 3)
    snapshot(poison=0, handled=60)
    poison(1, reason="first", group_key="a")
    poison(3, reason="newest", group_key="b")
    (note,) = shown(operator)[1]
    assert "newest (3 of the newest 3 poison messages)" in strip_tags(note)


def test_poison_of_another_error_hides_neither_the_version_nor_the_number_of_the_newest(operator: Client) -> None:
    snapshot(poison=0, handled=60)
    poison(1, reason="invoice of 0 cents", group_key="a", worker_version="41")
    poison(2, reason="KeyError: 'region'", group_key="b", worker_version="42")
    (note,) = shown(operator)[1]
    assert "region&#x27; (2 since " in strip_tags(note)
    assert ", all on version 42)" in strip_tags(note)


def test_the_queue_with_most_new_poison_comes_first(operator: Client) -> None:
    snapshot(poison=0, handled=60)
    snapshot("testapp.Shared", poison=0, handled=60)
    poison(2, reason="failed")
    Shared.send_many({"n": n} for n in range(3))  # more messages
    PoisonMessage.objects.create(message_id=uuid.uuid4(), queue="testapp.Shared", reason="failed")
    worker()
    worker("testapp.Shared")
    lines = [line["row"].label for line in operator.get(url(QueueControl)).context["lines"]]
    assert lines.index(LABEL) < lines.index("testapp.Shared")


def test_who_floods_a_queue_is_on_the_overview(operator: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overview_findings, "FLOODED_FROM", 10)
    Shared.send_many(({"n": n} for n in range(9)), headers={"tenant": "acme<b>"})
    assert shown(operator, "testapp.Shared")[1] == [], "not deep"
    Shared.send({}, headers={"tenant": "globex"})
    (note,) = shown(operator, "testapp.Shared")[1]
    assert "90 % of the newest 10 messages have tenant = acme&lt;b&gt;" in note
    assert f'<a href="{url(QueueControl, "charts", "testapp.Shared")}">Queue</a>' in note


def test_headers_that_all_messages_have_do_not_hide_who_floods_a_queue(
    operator: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overview_findings, "FLOODED_FROM", 10)
    common = {"NServiceBus.EnclosedMessageTypes": "Row", "source": "shop"}
    for number in range(10):
        Leased.send(Ping(str(number)), headers={**common, "tenant": "acme" if number else "globex"})
    (note,) = shown(operator)[1]
    assert "90 % of the newest 10 messages have tenant = acme" in note


def test_the_handler_that_hangs_is_linked_to_its_message(operator: Client) -> None:
    Leased.send({})
    seq = Leased.objects.get().pk
    worker(running=json.dumps([[seq, "shop.board", 600.0]]))
    (note,) = shown(operator)[1]
    assert f"message {seq} in shop.board on w-1:7 has run for 10 min" in strip_tags(note)
    assert f'<a href="{url(Leased, "change", seq)}">Message</a>' in note


def test_errors_and_headers_are_for_users_who_may_see_these_messages(
    staff: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overview_findings, "FLOODED_FROM", 1)
    snapshot(poison=0, handled=60, failed=60)
    worker()
    poison(1, reason="KeyError: 4711")
    Leased.send({}, headers={"tenant": "acme"})
    assert shown(staff("queueapp.operate_queue"))[1] == []
    assert "KeyError" in shown(staff("queueapp.operate_queue", "queueapp.view_poisonmessage"))[1][0]
    assert "acme" in shown(staff("queueapp.operate_queue", "testapp.view_leased"))[1][0]
