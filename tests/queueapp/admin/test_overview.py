"""The overview of the queues, and pausing, resuming and purging from it."""

import json
import re
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.contrib.admin.utils import unquote
from django.contrib.auth import get_user_model
from django.db import connection
from django.test import Client
from django.urls import resolve, set_script_prefix

from queueapp.admin import overview_rows
from queueapp.admin.formatting import untrusted
from queueapp.conf import MAX_CONCURRENCY
from queueapp.models import DISPATCHER, DelayedMessage, Now, PoisonMessage, QueueControl, QueueSnapshot, Subscriber
from queueapp.operations import control, statistics
from queueapp.operations.statistics import UNKNOWN
from queueapp.sql import backend_of
from tests.databases import only_on_postgresql
from tests.testapp.models import Leased, Readable, Short, Transactional

from .conftest import notes, url

LABEL = "testapp.Leased"


def line(client: Client, label: str = LABEL) -> overview_rows.OverviewRow:
    """What the overview says about a queue."""
    response = client.get(url(QueueControl))
    assert response.status_code == 200
    return next(row["row"] for row in response.context["lines"] if row["row"].label == label)


def subscriber(alive_for: timedelta) -> Subscriber:
    return Subscriber.objects.create(
        queue=LABEL, host="h", process=1, supervisor=uuid.uuid4(), alive_until=Now() + alive_for
    )


# -- figures -------------------------------------------------------------------------------------------------------


def test_every_queue_has_a_line_with_a_link_to_its_messages(operator: Client) -> None:
    text = operator.get(url(QueueControl)).content.decode()
    for queue in (Leased, Transactional, Readable, Short):
        assert f'<a href="{url(queue)}">{untrusted.breakable(queue._meta.label)}</a>' in text


def test_an_empty_queue_without_workers(operator: Client) -> None:
    found = line(operator)
    assert (found.waiting, found.leased, found.delayed, found.poison, found.workers, found.oldest) == (
        "0", "0", "0", "0", 0, None,
    )  # fmt: skip


def test_figures_of_a_busy_queue(operator: Client) -> None:
    Leased.send_many({"n": n} for n in range(6))
    first, second, third, *_ = Leased.objects.values_list("pk", flat=True)
    Leased.objects.filter(pk=second).update(enqueued_at=Now() - timedelta(hours=2))
    Leased.objects.filter(pk=first).update(lease_token=uuid.uuid4(), lease_expires=Now() + timedelta(minutes=5))
    Leased.objects.filter(pk=second).update(lease_token=uuid.uuid4(), lease_expires=Now() - timedelta(minutes=5))
    Leased.objects.filter(pk=third).update(expires=Now() - timedelta(minutes=5))
    Leased.send({}, delay=timedelta(hours=1))
    for status in ("unresolved", "unresolved", "archived"):
        PoisonMessage.objects.create(message_id=uuid.uuid4(), queue=LABEL, reason="r", status=status)
    subscriber(timedelta(minutes=1))
    subscriber(timedelta(minutes=-1))
    found = line(operator)
    assert (found.waiting, found.leased, found.lease_expired, found.expired) == ("4", "1", "1", "1")
    assert (found.delayed, found.poison, found.workers) == ("1", "2", 1)
    assert found.oldest is not None
    assert timedelta(hours=2) <= found.oldest < timedelta(hours=2, minutes=1)


def test_how_long_messages_wait_at_the_head_is_below_the_handling_time(operator: Client) -> None:
    now = backend_of(connection).now(connection)
    for number in range(1, 21):
        QueueSnapshot.objects.create(
            queue=LABEL, period=60, at=now - timedelta(minutes=number), ready=1, oldest_ms=1000 * number,
            handling_p50=0.01, handling_p95=0.25, seconds=60,
        )  # fmt: skip
    subscriber(timedelta(minutes=1))
    assert (line(operator).handling, line(operator).waits) == ("10 ms / 250 ms", "11.0 s / 20.0 s")
    assert "waiting 11.0 s / 20.0 s" in operator.get(url(QueueControl)).content.decode()


def test_links_lead_to_a_site_below_a_path(operator: Client) -> None:
    Leased.send({"order": 7})
    addresses = url(QueueControl), f"{url(QueueControl, 'search')}?q=order%3D7", url(PoisonMessage)
    set_script_prefix("/ops/")
    try:
        for address in addresses:
            text = operator.get(address).content.decode()
            links = [link for link in re.findall(r'(?:href|action)="(/[^"]+)"', text) if "static" not in link]
            assert links
            assert [link for link in links if not link.startswith("/ops/")] == []
    finally:
        set_script_prefix("/")


@pytest.mark.parametrize(("rows", "waiting"), [(5, "3+"), (4_870_000, "about 4.9 million")])
def test_counts_stop_and_report_it(operator: Client, monkeypatch: pytest.MonkeyPatch, rows: int, waiting: str) -> None:
    monkeypatch.setattr(statistics, "LIMIT", 3)
    monkeypatch.setattr(statistics.Database, "_estimate", lambda *_: rows if rows > 5 else 0)
    Leased.send_many({"n": n} for n in range(5))
    Leased.objects.filter(pk=Leased.objects.values_list("pk", flat=True).first()).update(
        lease_expires=Now() + timedelta(minutes=5)
    )
    for _ in range(5):
        Leased.send({}, delay=timedelta(hours=1))
        PoisonMessage.objects.create(message_id=uuid.uuid4(), queue=LABEL, reason="r")
    found = line(operator)
    assert (found.waiting, found.leased, found.delayed, found.poison) == (waiting, "1+", "3+", "3+")
    assert line(operator, "testapp.Short").delayed == "0", "it is not in the shadow of others"


@only_on_postgresql
def test_a_missing_table_is_a_note_and_the_other_queues_are_shown(operator: Client) -> None:
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE testapp_short RENAME TO elsewhere")
    found = line(operator, "testapp.Short")
    assert found.note.startswith("messages: the table does not exist, or lacks a column: ")
    assert found.note.endswith("; `manage.py migrate` creates it")
    assert "migrate" not in line(operator, "testapp.ForeignPostgres").note, "it is not ours to make"
    assert (found.waiting, found.leased, found.oldest, found.delayed, found.poison) == (
        UNKNOWN,
        UNKNOWN,
        None,
        "0",
        "0",
    )
    text = operator.get(url(QueueControl)).content.decode()
    assert "not readable" in text
    assert "testapp_short" in text, "the cause in the database's words"
    assert line(operator).note == ""


@only_on_postgresql
def test_what_cannot_be_read_is_a_dash_and_never_zero(operator: Client) -> None:
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE queueapp_poisonmessage RENAME TO elsewhere")
    found = line(operator)
    assert (found.waiting, found.delayed, found.poison) == ("0", "0", UNKNOWN)
    assert found.note.startswith("poison: the table does not exist")
    assert "incomplete" in operator.get(url(QueueControl)).content.decode()


def test_breakers_of_the_dispatcher_and_of_maintenance_are_shown(operator: Client) -> None:
    trouble = [
        {"name": f"{name} in default", "state": "open", "error": "deadlock detected"}
        for name in ("Dispatching", "Maintenance")
    ]
    Subscriber.objects.create(
        queue=DISPATCHER, host="h", process=1, supervisor=uuid.uuid4(), alive_until=Now() + timedelta(minutes=1),
        breakers=json.dumps(trouble),
    )  # fmt: skip
    text = operator.get(url(QueueControl)).content.decode()
    assert "Dispatching in default: open: deadlock detected" in text
    assert "Maintenance in default: open: deadlock detected" in text
    shown = [row for row in operator.get(url(QueueControl)).context["lines"] if row["row"].label == DISPATCHER]
    assert "open breakers" in shown[0]["state"]


def test_unroutable_messages_are_below_their_queue_and_those_of_unknown_queues_have_a_row(operator: Client) -> None:
    Subscriber.objects.create(
        queue=LABEL, host="h", process=1, supervisor=uuid.uuid4(), alive_until=Now() + timedelta(minutes=1),
        consumers=json.dumps([["c", "known"]]), unknown_types=json.dumps([""]),
    )  # fmt: skip
    Leased.send({"no": "type"})
    PoisonMessage.objects.create(message_id=uuid.uuid4(), queue="gone.Queue", reason="r")
    for hours in (-1, 1):
        DelayedMessage.objects.create(
            message_id=uuid.uuid4(), destination="away.Queue", due=Now() + timedelta(hours=hours)
        )
    lines = {item["row"].label: item for item in operator.get(url(QueueControl)).context["lines"]}

    (reported,) = map(str, lines[LABEL]["notes"])
    assert "1 message without a type, no consumer in a live worker; the oldest is " in reported
    assert (lines["gone.Queue"]["row"].poison, lines["gone.Queue"]["row"].waiting) == ("1", UNKNOWN)
    assert lines["away.Queue"]["row"].delayed == "2", "the one that is not due yet as well"
    for name in ("gone.Queue", "away.Queue"):
        assert "requeuepoison --to" in str(lines[name]["notes"])
        assert "no such queue" in str(lines[name]["state"])


# -- pause, resume, purge ------------------------------------------------------------------------------------------


def do(client: Client, verb: str, **options: Any) -> Any:
    """Answer the confirm page of an operation with yes; returns the page that follows."""
    return client.post(url(QueueControl, verb, LABEL), {"confirmed": "yes", **options}, follow=True)


@pytest.mark.parametrize(
    ("verb", "question"),
    [
        ("pause", "Pause testapp.Leased?"),
        ("resume", "Resume testapp.Leased (1 waiting message)?"),
        ("concurrency", "Change the concurrency of testapp.Leased?"),
        ("purge", "Purge testapp.Leased (1 waiting message)?"),
    ],
)
def test_every_operation_asks_and_changes_nothing_before_the_answer(operator: Client, verb: str, question: str) -> None:
    Leased.send({})
    asked = operator.post(url(QueueControl, verb, LABEL), {"receivers": "3"})
    assert question in asked.content.decode()
    assert (Leased.objects.count(), QueueControl.objects.count(), LogEntry.objects.count()) == (1, 0, 0)


def test_pause_and_resume_by_their_buttons(operator: Client) -> None:
    response = do(operator, "pause")
    assert notes(response) == ["Queue testapp.Leased is paused."]
    assert ">by operator<" in response.content.decode()
    assert line(operator).paused
    assert notes(do(operator, "pause")) == ["Queue testapp.Leased was paused already."]
    response = do(operator, "resume")
    assert notes(response) == ["Queue testapp.Leased is running again."]
    assert not line(operator).paused
    assert notes(do(operator, "resume")) == ["Queue testapp.Leased was not paused."]


def test_purge_asks_first_and_then_empties_the_queue(operator: Client) -> None:
    Leased.send_many({"n": n} for n in range(3))
    asked = operator.post(url(QueueControl, "purge", LABEL))
    assert "Purge testapp.Leased (3 waiting messages)?" in asked.content.decode()
    assert Leased.objects.count() == 3
    response = operator.post(url(QueueControl, "purge", LABEL), {"confirmed": "yes"}, follow=True)
    assert notes(response) == ["3 messages of testapp.Leased deleted."]
    assert not Leased.objects.exists()


def test_the_answer_to_a_purge_is_marked_as_dangerous_and_states_what_it_does(operator: Client) -> None:
    Leased.send_many([{}, {}])
    for verb, mark, answer in (
        ("purge", "queueapp-danger", "Purge testapp.Leased"),
        ("pause", "default", "Pause testapp.Leased"),
        ("concurrency", "default", "Set concurrency"),
    ):
        asked = operator.post(url(QueueControl, verb, LABEL)).content.decode()
        assert f'<input type="submit" class="{mark}" value="{answer}">' in asked


def test_concurrency_is_set_shown_and_taken_back(operator: Client) -> None:
    response = do(operator, "concurrency", receivers="8")
    assert notes(response) == ["Queue testapp.Leased: each worker process has 8 receivers."]
    text = response.content.decode()
    assert "8 receivers per process" in text
    assert ">by operator<" in text
    assert QueueControl.objects.get().concurrency == 8
    asked = operator.post(url(QueueControl, "concurrency", LABEL)).content.decode()
    assert 'name="receivers" value="8"' in asked, "what is set is in the form"
    assert notes(do(operator, "concurrency", receivers="8")) == [
        "Queue testapp.Leased: each worker process has 8 receivers, as before."
    ]
    response = do(operator, "concurrency", receivers="")
    assert notes(response) == [
        "Queue testapp.Leased: each worker process has as many receivers as it was started with."
    ]
    assert "per process" not in response.content.decode()
    assert QueueControl.objects.get().concurrency is None
    history = operator.get(url(QueueControl, "history", LABEL)).content.decode()
    assert "Concurrency set to 8." in history
    assert "Concurrency set to as started." in history


@pytest.mark.parametrize("receivers", ["0", "-1", str(MAX_CONCURRENCY + 1), "many", "1.5", "9" * 30, "a\0b"])
def test_a_concurrency_that_is_none_is_asked_for_again(operator: Client, receivers: str) -> None:
    response = do(operator, "concurrency", receivers=receivers)
    assert "Change the concurrency of testapp.Leased?" in response.content.decode()
    assert "errorlist" in response.content.decode()
    assert not QueueControl.objects.exists()


def test_history_of_a_queue_shows_who_did_what(operator: Client) -> None:
    do(operator, "pause")
    operator.post(url(QueueControl, "purge", LABEL), {"confirmed": "yes"})
    text = operator.get(url(QueueControl, "history", LABEL)).content.decode()
    assert "Paused." in text
    assert "testapp.Leased: running" not in text, "it is not"
    assert "Purged 0 messages." in text
    assert operator.get(url(QueueControl, "history", "testapp.Short")).status_code == 200


def test_history_of_no_queue_is_the_way_back(operator: Client) -> None:
    assert operator.get(url(QueueControl, "history", "no.Queue")).status_code == 302


@pytest.mark.parametrize("verb", ["pause", "resume", "concurrency", "purge"])
def test_operating_needs_post_csrf_and_a_queue(operator: Client, verb: str) -> None:
    assert operator.get(url(QueueControl, verb, LABEL)).status_code == 405
    assert operator.post(url(QueueControl, verb, "no.Queue")).status_code == 404
    strict = Client(enforce_csrf_checks=True)
    strict.force_login(get_user_model().objects.get())
    assert strict.post(url(QueueControl, verb, LABEL), {"confirmed": "yes"}).status_code == 403
    assert not QueueControl.objects.exists()


# -- who may -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["pause", "resume", "concurrency", "purge"])
def test_operating_needs_the_permission(staff: Callable[..., Client], verb: str) -> None:
    Leased.send({})
    viewer = staff("queueapp.view_queuecontrol", "queueapp.change_queuecontrol", "testapp.delete_leased")
    assert viewer.post(url(QueueControl, verb, LABEL), {"confirmed": "yes"}).status_code == 403
    assert (Leased.objects.count(), LogEntry.objects.count()) == (1, 0)
    text = viewer.get(url(QueueControl)).content.decode()
    assert not [word for word in ("Pause", "Concurrency", "Purge") if word in text]


def test_an_operator_without_view_permissions_may_operate_but_gets_no_links(staff: Callable[..., Client]) -> None:
    client = staff("queueapp.operate_queue")
    text = client.get(url(QueueControl)).content.decode()
    assert "Purge…" in text
    assert url(Leased) not in text
    assert url(PoisonMessage) not in text
    assert client.post(url(QueueControl, "pause", LABEL), {"confirmed": "yes"}).status_code == 302
    assert QueueControl.objects.get().paused


@pytest.mark.parametrize("permission", ["testapp.view_leased", "queueapp.view_poisonmessage"])
def test_without_permission_there_is_no_overview(staff: Callable[..., Client], permission: str) -> None:
    client = staff(permission)
    assert client.get(url(QueueControl)).status_code == 403
    assert url(QueueControl) not in client.get("/admin/").content.decode()


def test_overview_is_in_the_index(operator: Client) -> None:
    assert f'<a href="{url(QueueControl)}">Queues</a>' in operator.get("/admin/").content.decode()


def test_there_is_no_page_to_edit_a_control_row(operator: Client) -> None:
    control.pause(Leased)
    base = url(QueueControl)
    assert operator.get(f"{base}{LABEL}/change/")["Location"] == base
    answers: list[Any] = [operator.get(f"{base}{LABEL}/{page}") for page in ("delete/", "")]
    answers += [operator.get(f"{base}add/"), operator.post(base, {"action": "delete_selected"})]
    answers.append(operator.post(f"{base}{LABEL}/change/", {"paused": ""}))
    assert [answer.status_code for answer in answers] == [404, 404, 404, 403, 403]
    assert QueueControl.objects.get().paused


def test_the_history_of_a_queue_whose_label_looks_quoted(operator: Client) -> None:
    """In an address "_24" is Django's way to write a dollar sign."""
    of = statistics.QueueStats("shop_24h.Orders", "orders", "default", "")
    page: Any = admin.site._registry[QueueControl]
    found = page.of_known_queue(overview_rows.OverviewRow(Leased, of))
    assert unquote(resolve(found["history_url"]).kwargs["object_id"]) == "shop_24h.Orders"
    assert resolve(found["operations"][0][1]).kwargs["label"] == "shop_24h.Orders"
