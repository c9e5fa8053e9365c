"""The page of schedules: what it shows, making and changing one, and pause, resume and run."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from django.test import Client

from queueapp.models import Schedule
from queueapp.schedules import declarations, stored
from tests.testapp.models import Leased

from .conftest import notes, url

pytestmark = pytest.mark.django_db

FORM = {
    "name": "by hand", "queue": "testapp.Leased", "tags": "", "cron": "0 3 * * *", "timezone": "Europe/Oslo",
    "every": "",
    "at_0": "", "at_1": "", "start_0": "", "start_1": "", "end_0": "", "end_1": "", "jitter": "", "misfire": "once",
    "misfire_limit": "100", "misfire_grace": "60", "headers": '{"type": "x.Y"}', "body": '{"n": 1}', "options": "",
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_declarations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(declarations, "declared", {})


def made(**columns: Any) -> Schedule:
    row = Schedule(**{"name": "tested", "queue": "testapp.Leased", "every": timedelta(hours=1), **columns})
    stored.plan(row, "default")
    row.save()
    return row


def act(client: Client, action: str, *names: str) -> Any:
    return client.post(url(Schedule), {"action": action, "_selected_action": names}, follow=True)


def test_a_schedule_is_made_shown_and_sent(operator: Client) -> None:
    response = operator.post(url(Schedule, "add"), FORM)

    assert response.status_code == 302, response.context["adminform"].form.errors
    row = Schedule.objects.get()
    assert row.next_at is not None
    assert "0 3 * * *" in operator.get(url(Schedule)).content.decode()
    page = operator.get(url(Schedule, "change", "by hand")).content.decode()
    assert page.count("queueapp-aside") >= 9  # the next ten times, the first without

    stored.run_now("default", "by hand")
    assert '"type":"x.Y"' in Leased.objects.get().headers.replace(" ", "")


@pytest.mark.parametrize(
    "changes",
    [
        {"cron": "nonsense"},
        {"cron": ""},
        {"timezone": "Europe/Atlantis"},
        {"body": "{"},
        {"headers": "[]"},
        {"options": '{"priority": 9}'},
        {"options": "{"},
        {"options": '{"expires_in": "soon"}'},
        {"options": '{"expires_in": 1e300}'},
        {"options": '{"reply_to": []}'},
        {"name": "a:b"},
        {"misfire_limit": "0"},
        {"jitter": "9 00:00:00"},
        {"queue": "shop.Orders"},
    ],
)
def test_what_could_not_run_is_refused(operator: Client, changes: dict[str, str]) -> None:
    response = operator.post(url(Schedule, "add"), {**FORM, **changes})

    assert response.status_code == 200
    assert response.context["adminform"].form.errors
    assert not Schedule.objects.exists()


def test_a_change_keeps_what_the_dispatcher_wrote_meanwhile(operator: Client) -> None:
    row = made(name="by hand", every=None, cron="0 3 * * *", timezone="Europe/Oslo")
    page = operator.get(url(Schedule, "change", "by hand"))
    assert page.status_code == 200
    later = row.next_at + timedelta(days=1)
    Schedule.objects.update(next_at=later, due_at=later, runs=1)

    operator.post(url(Schedule, "change", "by hand"), {**FORM, "body": '{"n": 2}'})

    row.refresh_from_db()
    assert (row.body, row.next_at, row.runs) == ('{"n": 2}', later, 1)

    operator.post(url(Schedule, "change", "by hand"), {**FORM, "body": '{"n": 2}', "cron": "0 4 * * *"})
    row.refresh_from_db()
    assert row.next_at < later


def test_what_is_declared_is_paused_and_run_here_and_not_changed(operator: Client) -> None:
    Leased.schedule({}, name="declared", every=3600)
    stored.declare("default")

    assert "declared in code" in operator.get(url(Schedule)).content.decode()
    assert operator.post(url(Schedule, "change", "declared"), FORM).status_code == 403
    assert operator.post(url(Schedule, "delete", "declared"), {"post": "yes"}).status_code == 403
    assert notes(act(operator, "pause", "declared")) == ["1 schedule paused."]
    assert Schedule.objects.get().paused
    assert notes(act(operator, "resume", "declared")) == ["1 schedule resumed."]
    assert notes(act(operator, "run_now", "declared")) == ["1 schedule run."]
    assert Leased.objects.count() == 1
    assert "Schedule paused." in operator.get(url(Schedule, "history", "declared")).content.decode()


def test_a_run_that_is_refused_is_reported(operator: Client) -> None:
    made(options='{"priority": 9}')

    shown = notes(act(operator, "run_now", "tested"))

    assert "priority = 9" in shown[0]
    assert shown[1] == "0 schedules run."


def test_hostile_text_is_shown_as_text(operator: Client) -> None:
    made(name="<script>alert(1)</script>", tags="<b>", body='"<script>alert(2)</script>"')

    for page in (url(Schedule), url(Schedule, "change", "_3Cscript_3Ealert(1)_3C_2Fscript_3E")):
        text = operator.get(page).content.decode()
        assert "<script>alert(" not in text


def test_permissions(staff: Callable[..., Client]) -> None:
    made()

    viewer = staff("queueapp.view_schedule")
    assert viewer.get(url(Schedule)).status_code == 200
    assert viewer.get(url(Schedule, "add")).status_code == 403
    act(viewer, "pause", "tested")
    assert not Schedule.objects.get().paused
    assert staff("queueapp.view_subscriber").get(url(Schedule)).status_code == 403
    act(staff("queueapp.operate_queue"), "pause", "tested")
    assert Schedule.objects.get().paused


def test_a_time_is_one_of_the_time_zone_also_without_use_tz(operator: Client, settings: Any) -> None:
    settings.USE_TZ, settings.TIME_ZONE = False, "Asia/Kolkata"
    form = {**FORM, "cron": "", "timezone": "", "at_0": "2031-01-02", "at_1": "12:00:00"}
    noon = datetime(2031, 1, 2, 12, tzinfo=ZoneInfo("Asia/Kolkata"))

    response = operator.post(url(Schedule, "add"), form)
    assert response.status_code == 302, response.context["adminform"].form.errors
    assert Schedule.objects.get().at == noon

    assert 'value="12:00:00"' in operator.get(url(Schedule, "change", "by hand")).content.decode()
    operator.post(url(Schedule, "change", "by hand"), {**form, "body": '{"n": 2}'})
    row = Schedule.objects.get()
    assert (row.at, row.body) == (noon, '{"n": 2}')


def test_a_name_that_was_written_past_its_check_is_escaped_on_its_page(operator: Client) -> None:
    operator.post(url(Schedule, "add"), FORM)
    Schedule.objects.update(name="a\u202eb\x1b")

    page = operator.get(url(Schedule, "change", "a\u202eb\x1b"))

    title = page.content.decode().split("<title>")[1].split("</title>")[0]
    assert "\u202e" not in title
    assert "\x1b" not in title
