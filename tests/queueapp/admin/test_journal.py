"""The journal in the admin: a list, a page for each entry, and nothing that changes one."""

from __future__ import annotations

import html
import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.test import Client

from queueapp import publish
from queueapp.models import BulkOperation, JournalEntry, Now
from queueapp.operations import bulk_operations
from tests.testapp.models import Leased

from .conftest import notes, url

HOSTILE = "journaled.<script>alert(1)</script>"


@pytest.fixture
def entries(db: None, settings: Any) -> list[int]:
    """One that a queue took, one for a queue that is fed, and one without a queue, with a hostile name."""
    settings.QUEUEAPP = {"JOURNAL": {"^journaled": None}}
    publish("journaled.orders", {"n": 1}, headers={"type": "shop.Order"}, correlation_id="c-1")
    publish("journaled.deep", {"n": 2})
    publish(HOSTILE, b"\0\xff")
    return list(JournalEntry.objects.order_by("seq").values_list("pk", flat=True))


def listed(client: Client, query: str = "") -> list[int]:
    response = client.get(url(JournalEntry) + query)
    assert response.status_code == 200
    return [row.pk for row in response.context["cl"].result_list]


def test_list_has_the_newest_first_and_names_who_took_it(operator: Client, entries: list[int]) -> None:
    assert listed(operator) == entries[::-1]
    text = operator.get(url(JournalEntry)).content.decode()
    for expected in (
        "journaled.orders",
        "testapp.Recovered",
        "testapp.Deep",
        "(when the queue has capacity)",
        "shop.Order",
    ):
        assert expected in text
    assert "<script>alert" not in text
    assert 'name="action"' not in text, "there is nothing to be done to an entry"


def test_filters_by_topic_and_time(operator: Client, entries: list[int]) -> None:
    JournalEntry.objects.filter(pk=entries[0]).update(published_at=Now() - timedelta(hours=5))

    assert listed(operator, "?topic=journaled.deep") == [entries[1]]
    assert listed(operator, "?topic=journaled.nothing") == []
    assert listed(operator, "?published=hour") == entries[:0:-1]
    assert listed(operator, "?published=day&topic=journaled.orders") == [entries[0]]
    assert listed(operator, f"?seq__lte={entries[1]}") == entries[1::-1]
    assert operator.get(url(JournalEntry) + "?body=1").status_code == 400


def test_search_by_bookmark_id_and_beginning_of_an_id(operator: Client, entries: list[int]) -> None:
    entry = JournalEntry.objects.get(pk=entries[0])
    assert listed(operator, f"?q={entries[0]}") == [entries[0]]
    assert listed(operator, f"?q={entry.message_id}") == [entries[0]]
    assert entries[0] in listed(operator, f"?q={str(entry.message_id)[:20]}")


def test_page_of_one_entry(operator: Client, entries: list[int]) -> None:
    text = operator.get(url(JournalEntry, "change", entries[0])).content.decode()
    for expected in ("journaled.orders", "testapp.Recovered", "shop.Order", "&quot;n&quot;: 1", "c-1", "Bookmark"):
        assert expected in text
    assert operator.get(url(JournalEntry, "body", entries[2])).content == b"\0\xff"
    assert operator.get(url(JournalEntry, "history", entries[0])).status_code == 403, "nothing is ever done to one"
    assert "historylink" not in text


def test_entry_cannot_be_added_changed_or_deleted(operator: Client, entries: list[int]) -> None:
    assert operator.get(url(JournalEntry, "add")).status_code == 403
    assert operator.post(url(JournalEntry, "change", entries[0]), {"topic": "x"}).status_code == 403
    assert operator.post(url(JournalEntry, "delete", entries[0]), {"post": "yes"}).status_code == 403
    operator.post(url(JournalEntry), {"action": "delete_selected", "_selected_action": entries, "post": "yes"})
    assert JournalEntry.objects.count() == 3


def test_body_is_shown_to_users_who_may_view_its_queues(staff: Callable[..., Client], entries: list[int]) -> None:
    item, all_queues = (
        staff("queueapp.view_journalentry", *part) for part in ([], ["testapp.view_recovered", "testapp.view_wide"])
    )
    taken = url(JournalEntry, "change", entries[0])
    assert "Only users who may view the messages of" in item.get(taken).content.decode()
    assert item.get(url(JournalEntry, "body", entries[0])).status_code == 403
    assert "&quot;n&quot;: 1" in all_queues.get(taken).content.decode()
    assert item.get(url(JournalEntry, "body", entries[2])).status_code == 200, "it was for no queue"


def test_journal_is_not_shown_without_the_permission(staff: Callable[..., Client], entries: list[int]) -> None:
    client = staff("testapp.view_recovered")
    assert client.get(url(JournalEntry)).status_code == 403
    assert client.get(url(JournalEntry, "change", entries[0])).status_code == 403


# -- replaying -----------------------------------------------------------------------------------------------------


REPLAY: dict[str, Any] = {"topic": "journaled.orders", "since": "epoch", "filter": "/n > 3", "to": "testapp.Leased"}


@pytest.fixture
def orders(transactional_db: None, settings: Any) -> list[int]:
    """The bookmarks of ten publications of a topic, and one of another."""
    settings.QUEUEAPP = {"JOURNAL": {"^journaled": None}}
    for number in range(1, 11):
        publish("journaled.orders", {"n": number})
    publish("journaled.deep", {"n": 11})
    return list(JournalEntry.objects.order_by("seq").values_list("pk", flat=True))


def replay(client: Client, **values: Any) -> Any:
    """Count, and answer the question with yes."""
    given = REPLAY | values
    counted = client.post(url(JournalEntry, "replay"), given)
    assert counted.status_code == 200
    if "Replay " not in counted.context["title"] or not counted.context["title"].endswith("?"):
        return counted
    return client.post(url(JournalEntry, "replay"), dict(counted.context["hidden"]), follow=True)


def test_a_replay_shows_how_many_and_becomes_an_operation(
    operator: Client, orders: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = operator.post(url(JournalEntry, "replay"), REPLAY)
    assert counted.context["title"] == "Replay 7 messages into testapp.Leased?"
    assert not BulkOperation.objects.exists()

    response = replay(operator, rate="1000")
    operation = BulkOperation.objects.get()
    assert notes(response) == [f"Operation {operation.pk} has started."]
    assert "filter: /n &gt; 3" in response.content.decode()
    assert not Leased.objects.exists()
    publish("journaled.orders", {"n": 100})  # later

    monkeypatch.setattr(bulk_operations, "BATCH", 4)
    bulk_operations.carry_out("default", iter([True, False]).__next__)
    operation.refresh_from_db()
    assert (operation.state, operation.cursor, operation.changed) == ("running", orders[3], 1)
    BulkOperation.objects.update(next_at=Now(), rate=None)
    bulk_operations.carry_out("default")
    operation.refresh_from_db()
    assert (operation.state, operation.changed, operation.failed) == ("finished", 7, 0)
    bodies = Leased.objects.order_by("seq").values_list("body", flat=True)
    assert [json.loads(bytes(body))["n"] for body in bodies] == [4, 5, 6, 7, 8, 9, 10]


def test_a_replay_begins_behind_a_bookmark(operator: Client, orders: list[int]) -> None:
    replay(operator, since=str(orders[7]), filter="")
    bulk_operations.carry_out("default")
    assert Leased.objects.count() == 2


@pytest.mark.parametrize(
    ("values", "error"),
    [({"since": "yesterday"}, "since = "), ({"since": "999999"}, "999999"), ({"filter": "/n >"}, "/n"),
     ({"topic": "("}, "a name or a regular expression")],
)  # fmt: skip
def test_what_a_replay_would_refuse_is_shown_in_its_form(
    operator: Client, orders: list[int], values: dict[str, str], error: str
) -> None:
    text = operator.post(url(JournalEntry, "replay"), REPLAY | values).content.decode()
    assert "errorlist" in text
    assert error in html.unescape(text)
    assert not BulkOperation.objects.exists()


def test_a_replay_whose_next_bookmark_is_gone_pauses_and_doubles_nothing(
    operator: Client, orders: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    replay(operator, filter="")
    monkeypatch.setattr(bulk_operations, "BATCH", 4)
    bulk_operations.carry_out("default", iter([True, False]).__next__)
    JournalEntry.objects.filter(pk=orders[3]).delete()
    bulk_operations.carry_out("default")
    operation = BulkOperation.objects.get()
    assert (operation.state, operation.changed) == ("paused", 4)
    assert operation.note.startswith("Paused by an error")


def test_replaying_needs_its_permission(staff: Callable[..., Client], orders: list[int]) -> None:
    viewer, replayer = staff("queueapp.view_journalentry"), staff(
        "queueapp.view_journalentry", "queueapp.replay_journalentry"
    )  # fmt: skip
    address = url(JournalEntry, "replay")
    assert (viewer.get(address).status_code, viewer.post(address, REPLAY).status_code) == (403, 403)
    assert "Replay…" not in viewer.get(url(JournalEntry)).content.decode()
    assert replayer.get(address).status_code == 200
    assert "Replay…" in replayer.get(url(JournalEntry)).content.decode()
