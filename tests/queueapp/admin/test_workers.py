"""The workers: which are alive, and nothing to change."""

import json
import uuid
from collections.abc import Callable
from datetime import timedelta

import pytest
from django.test import Client

from queueapp.models import NO_QUEUES, Now, QueueControl, Subscriber

from .conftest import url


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
