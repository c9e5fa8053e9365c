"""The journal in the admin: a list, a page for each entry, and nothing that changes one."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.test import Client

from queueapp import publish
from queueapp.models import JournalEntry, Now

from .conftest import url

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
