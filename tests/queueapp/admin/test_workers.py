"""The workers: which are alive, what they handle, and how a tree is asked to stop."""

import json
import uuid
from collections.abc import Callable
from datetime import timedelta

import pytest
from django.contrib.admin.models import LogEntry
from django.test import Client

from queueapp.models import DISPATCHER, MAINTENANCE, NO_QUEUES, Leader, Now, QueueControl, Subscriber

from .conftest import notes, url


@pytest.fixture
def pair(db: None) -> tuple[Subscriber, Subscriber]:
    """A live one and one that died three minutes ago."""
    made = [
        Subscriber.objects.create(
            queue="testapp.Leased", host=host, process=7, supervisor=uuid.uuid4(), alive_until=Now() + alive_for
        )
        for host, alive_for in (("alive-1", timedelta(minutes=1)), ("dead-1", timedelta(minutes=-3)))
    ]
    return made[0], made[1]


def test_list_distinguishes_live_and_dead_workers(operator: Client, pair: tuple[Subscriber, Subscriber]) -> None:
    text = operator.get(url(Subscriber)).content.decode()
    for expected in ("alive-1:7", "dead-1:7", ">alive</span>", "dead for 3 min"):
        assert expected in text
    for choice, shown in (("yes", [pair[0]]), ("no", [pair[1]])):
        assert list(operator.get(url(Subscriber) + f"?alive={choice}").context["cl"].result_list) == shown


def test_an_empty_list_of_workers_has_a_text(operator: Client, db: None) -> None:
    assert "No workers." in operator.get(url(Subscriber)).content.decode()
    assert "No workers match." in operator.get(url(Subscriber) + "?alive=yes").content.decode()


def test_how_far_handlers_are_is_shown_as_text(operator: Client, pair: tuple[Subscriber, Subscriber]) -> None:
    item = {"id": str(uuid.uuid4()), "seq": 7, "consumer": "shop.read", "attempt": 1, "seconds": 3.5, "done": 1200}
    reported = [
        item | {"total": 4800, "note": "<b>reading</b>"},
        item | {"total": None, "note": ""},
        {"of": "another version"},
    ]
    Subscriber.objects.filter(pk=pair[0].pk).update(progress=json.dumps(reported))
    for address in (url(Subscriber), url(Subscriber, "change", pair[0].pk)):
        text = operator.get(address).content.decode()
        assert "read: 1,200 of 4,800 (25%), &lt;b&gt;reading&lt;/b&gt;" in text
        assert "read: 1,200, " in text
        assert "<b>reading" not in text


def test_what_a_worker_reports_is_on_its_page_whatever_version_it_is(
    operator: Client, pair: tuple[Subscriber, Subscriber]
) -> None:
    Subscriber.objects.filter(pk=pair[0].pk).update(
        breakers=json.dumps([{"name": "Renewal", "state": "failing", "error": "<b>gone"}, 7]),
        consumers=json.dumps([["invoices", "shop.Paid"], ["all", ""], "of another version", [1]]),
        unknown_types=json.dumps(["shop.Late", ""]),
    )
    text = operator.get(url(Subscriber, "change", pair[0].pk)).content.decode()
    for line in (
        "Renewal",
        "&lt;b&gt;gone",
        "invoices: shop.Paid",
        "all: messages without a type",
        "shop.Late",
        "no type",
    ):
        assert line in text
    assert operator.get(url(QueueControl)).status_code == 200


def test_a_process_shows_memory_restarts_and_what_it_handles_for_how_long(
    operator: Client, pair: tuple[Subscriber, Subscriber]
) -> None:
    running = [[17, "shop.board<b>", 90.0], [18, "shop.board", 2.0], "of another version"]
    Subscriber.objects.filter(pk=pair[0].pk).update(running=json.dumps(running), memory=96 * 2**20, restarts=2)
    for address in (url(Subscriber), url(Subscriber, "change", pair[0].pk)):
        text = operator.get(address).content.decode()
        assert '<span class="queueapp-problem">message 17 in <bdi' in text
        assert "shop.board&lt;b&gt;" in text
        assert "message 18 in" in text
    shown = operator.get(url(Subscriber)).content.decode()
    assert "96.0 MiB" in shown
    assert "2 restarts" in shown


def test_the_elected_processes_are_marked(operator: Client, db: None) -> None:
    rows = [
        Subscriber.objects.create(
            queue=name, host=host, process=7, supervisor=uuid.uuid4(), alive_until=Now() + timedelta(minutes=1)
        )
        for host in ("first", "second")
        for name in (MAINTENANCE, DISPATCHER)
    ]
    roles = {"maintenance 01234567": rows[0], "delayed dispatcher 01234567": rows[3], "journal 01234567": rows[1]}
    for role, row in roles.items():
        holder = uuid.uuid5(row.supervisor, "default")
        Leader.objects.create(role=role, holder=holder, expires=Now() + timedelta(minutes=1))
    listed = operator.get(url(Subscriber)).context["cl"].result_list
    assert {(row.host, *row.elected) for row in listed if row.elected} == {
        ("first", MAINTENANCE), ("second", DISPATCHER),
    }  # fmt: skip
    Leader.objects.update(expires=Now() - timedelta(seconds=1))
    assert not any(row.elected for row in operator.get(url(Subscriber)).context["cl"].result_list)


def test_workers_that_died_lately_are_named_with_what_was_released(operator: Client, db: None) -> None:
    for queue, hours in (("testapp.Leased", 1), ("testapp.Urgent", 30)):
        QueueControl.objects.create(
            queue=queue, last_death="w-1:7 (leases released: 12)", last_death_at=Now() - timedelta(hours=hours)
        )
    text = operator.get(url(Subscriber)).content.decode()
    assert text.count("stopped without deregistering") == 1
    assert "w-1:7 (leases released: 12)" in text


def test_a_tree_is_asked_to_stop_once_and_after_confirmation(
    operator: Client, pair: tuple[Subscriber, Subscriber]
) -> None:
    tree = {"host": "alive-1", "supervisor": pair[0].supervisor, "alive_until": Now() + timedelta(minutes=1)}
    Subscriber.objects.create(queue="testapp.Leased", process=8, **tree)
    service = Subscriber.objects.create(queue=MAINTENANCE, process=9, **tree)
    data = {"action": "stop_gracefully", "_selected_action": [pair[0].pk]}

    asked = operator.post(url(Subscriber), data)
    assert "Stop 1 tree of worker processes?" in asked.content.decode()
    assert not Subscriber.objects.filter(stop_requested=True).exists()

    confirmed = {**data, "confirmed": "yes"}
    assert notes(operator.post(url(Subscriber), confirmed, follow=True)) == ["1 tree asked to stop."]
    assert Subscriber.objects.filter(stop_requested=True).count() == 1, "a second request would not wait for handlers"
    assert ">asked to stop</span>" in operator.get(url(Subscriber)).content.decode()
    assert LogEntry.objects.get().change_message == "Asked to stop."

    assert notes(operator.post(url(Subscriber), confirmed, follow=True)) == ["0 trees asked to stop."]
    only_service = {**data, "_selected_action": [service.pk]}
    assert "Nothing was changed" in notes(operator.post(url(Subscriber), only_service, follow=True))[0]


def test_stopping_needs_operate_queue(staff: Callable[..., Client], pair: tuple[Subscriber, Subscriber]) -> None:
    data = {"action": "stop_gracefully", "_selected_action": [pair[0].pk], "confirmed": "yes"}
    staff("queueapp.view_subscriber").post(url(Subscriber), data)
    assert not Subscriber.objects.filter(stop_requested=True).exists()
    staff("queueapp.view_subscriber", "queueapp.operate_queue").post(url(Subscriber), data)
    assert Subscriber.objects.filter(stop_requested=True).count() == 1


@pytest.mark.parametrize("name", sorted(NO_QUEUES))
def test_who_receives_nothing_has_no_zeros(operator: Client, db: None, name: str) -> None:
    row = Subscriber.objects.create(
        queue=name, host="h", process=7, supervisor=uuid.uuid4(), alive_until=Now() + timedelta(minutes=1)
    )
    shown = operator.get(url(Subscriber)).content.decode()
    assert "0 handled" not in shown
    assert "in flight" not in shown
    page = operator.get(url(Subscriber, "change", row.pk)).content.decode()
    assert "Received" not in page
    assert "Open breakers" in page


def test_page_is_read_only(operator: Client, pair: tuple[Subscriber, Subscriber]) -> None:
    address = url(Subscriber, "change", pair[0].pk)
    assert str(pair[0].supervisor) in operator.get(address).content.decode()
    assert operator.post(address, {"host": "x"}).status_code == 403
    assert operator.get(url(Subscriber, "add")).status_code == 403
    assert operator.post(url(Subscriber, "delete", pair[0].pk), {"post": "yes"}).status_code == 403


def test_view_permission_is_needed(staff: Callable[..., Client], pair: tuple[Subscriber, Subscriber]) -> None:
    assert staff("queueapp.view_subscriber").get(url(Subscriber)).status_code == 200
    assert staff("queueapp.operate_queue").get(url(Subscriber)).status_code == 403


@pytest.mark.parametrize("name", ["host__regex", "host", "queue__iregex", "supervisor"])
def test_look_ups_that_no_filter_offers_are_refused(operator: Client, name: str) -> None:
    assert operator.get(url(Subscriber), {name: "["}).status_code == 400
    assert operator.get(url(Subscriber), {"queue": "[", "alive": "yes"}).status_code == 200


def test_a_host_name_cannot_turn_the_title_around(operator: Client, db: None) -> None:
    hostile = "evil\u202eexe.gpj"
    row = Subscriber.objects.create(
        queue="testapp.Leased",
        host=hostile,
        process=7,
        supervisor=uuid.uuid4(),
        alive_until=Now() + timedelta(minutes=1),
    )
    for page in (url(Subscriber), url(Subscriber, "change", row.pk), url(Subscriber, "history", row.pk)):
        text = operator.get(page).content.decode()
        assert "\u202e" not in text, page
        assert "⟨U+202E⟩" in text or page.endswith("/history/"), page


def test_a_process_with_several_queues_is_one_row(operator: Client, db: None) -> None:
    common = {"host": "w", "process": 7, "process_start": "boot", "supervisor": uuid.uuid4(), "concurrency": 4}
    for queue in ("testapp.Leased", "testapp.Transactional", NO_QUEUES[0]):
        Subscriber.objects.create(
            queue=queue, handled=10, received=11, alive_until=Now() + timedelta(minutes=1), **common
        )
    again = common | {"process_start": "another boot", "supervisor": uuid.uuid4()}
    Subscriber.objects.create(queue="testapp.Leased", handled=1, alive_until=Now() - timedelta(minutes=1), **again)

    response = operator.get(url(Subscriber))
    rows = response.context["cl"].result_list
    assert sorted(len(row.of_process) for row in rows) == [1, 3]
    text = response.content.decode()
    for row in Subscriber.objects.all():
        assert f'<a href="{url(Subscriber, "change", row.pk)}">' in text
    assert "20 handled" in text
    assert "4 receivers, 0 in flight" in text

    of_one_queue = operator.get(url(Subscriber) + "?queue=testapp.Transactional").context["cl"].result_list
    assert [len(row.of_process) for row in of_one_queue] == [3]
    assert len(operator.get(url(Subscriber) + "?alive=no").context["cl"].result_list) == 1
