"""A group of poison messages: its canary, and the notes on it."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from datetime import timedelta

import pytest
from django.contrib.admin.models import LogEntry
from django.test import Client

from queueapp.models import BulkOperation, Now, PoisonMessage, PoisonNote, Subscriber
from queueapp.operations import bulk_operations
from tests.testapp.models import Leased

from .conftest import notes, url

GROUP = "a" * 32


@pytest.fixture
def group(db: None) -> str:
    """The query of a group in two queues; a worker of the first one is alive."""
    for queue in ("testapp.Leased", "testapp.Leased", "testapp.Short"):
        PoisonMessage.objects.create(
            message_id=uuid.uuid4(), queue=queue, reason="ValueError: no gate", group_key=GROUP, headers="{}"
        )
    Subscriber.objects.create(
        queue="testapp.Leased", host="h", process=1, supervisor=uuid.uuid4(), version="2.0",
        alive_until=Now() + timedelta(hours=1),
    )  # fmt: skip
    return f"?group={GROUP}"


def test_a_canary_is_started_from_its_group_and_has_the_page_of_an_operation(operator: Client, group: str) -> None:
    page = url(PoisonMessage, "canary") + group
    assert f"canary/{group}" in operator.get(url(PoisonMessage)).content.decode()
    asked = operator.get(page)
    assert [value for value, _ in asked.context["form"].fields["queue"].choices] == ["testapp.Leased", "testapp.Short"]
    assert not BulkOperation.objects.exists()

    response = operator.post(page, {"confirmed": "yes", "queue": "testapp.Leased", "budget": "3"}, follow=True)

    operation = BulkOperation.objects.get()
    assert notes(response) == [f"Operation {operation.pk} has started."]
    assert (operation.username, json.loads(operation.options)) == ("operator", {"version": "2.0", "budget": 3})
    assert LogEntry.objects.get().change_message == (
        f"Canary of group {GROUP}, queue testapp.Leased, budget 3: operation {operation.pk}"
    )
    bulk_operations.carry_out("default")
    assert Leased.objects.count() == 1
    text = operator.get(url(BulkOperation, "change", operation.pk)).content.decode()
    assert "Requeue after deploy" in text
    assert "1 of the last batch" in text
    assert "Messages a second" not in text, "its next batch waits for the end of the last one"
    assert f"Canary on version 2.0: operation {operation.pk}." in operator.get(url(PoisonMessage)).content.decode()


def test_what_keeps_a_canary_from_starting_is_a_message(operator: Client, group: str) -> None:
    page = url(PoisonMessage, "canary") + group
    response = operator.post(page, {"confirmed": "yes", "queue": "testapp.Short", "budget": "3"}, follow=True)
    assert "testapp.Short: no worker is alive" in notes(response)[0]
    invalid = operator.post(page, {"confirmed": "yes", "queue": "testapp.Urgent", "budget": "-3"})
    assert set(invalid.context["form"].errors) == {"queue", "budget"}
    assert operator.get(url(PoisonMessage, "canary") + "?group=unknown").status_code == 404
    assert not BulkOperation.objects.exists()


def test_a_canary_shows_a_budget_of_none_and_why_it_has_skipped_messages(operator: Client) -> None:
    operation = BulkOperation.objects.create(
        action="requeue_after_deploy", source="queueapp.PoisonMessage", first=1, last=9, cursor=4, skipped=2,
        filters=json.dumps({"queue": "testapp.Leased", "group": GROUP}),
        options=json.dumps({"version": "2.0", "budget": 0}),
    )  # fmt: skip
    text = operator.get(url(BulkOperation, "change", operation.pk)).content.decode()
    assert "budget: 0" in text
    assert "2 (locked by another session, or a message with the same dedupe key waits)" in text


def test_a_note_is_shown_where_its_group_is(operator: Client, group: str) -> None:
    page = url(PoisonMessage, "note") + group
    operator.get(page)
    assert not PoisonNote.objects.exists()

    response = operator.post(page, {"confirmed": "yes", "text": "Ticket 17 <script>alert(1)</script>"}, follow=True)

    assert notes(response) == ["The note was saved."]
    assert response.request["QUERY_STRING"] == group[1:]
    for text in (response.content.decode(), operator.get(url(PoisonMessage)).content.decode()):
        assert "Ticket 17 &lt;script&gt;" in text
        assert "<script>alert(" not in text
    assert "Ticket 17" in LogEntry.objects.get().change_message
    assert operator.post(page, {"confirmed": "yes", "text": ""}).context["form"].errors
    assert operator.post(page, {"confirmed": "yes", "text": "x" * 1001}).context["form"].errors
    assert PoisonNote.objects.count() == 1


def test_the_newest_note_stands_in_the_list_of_groups(operator: Client, group: str) -> None:
    for text in ("the first", "the second"):
        PoisonNote.objects.create(group_key=GROUP, text=text, username="ada")
    PoisonNote.objects.create(group_key="b" * 32, text="of another group")
    listed = operator.get(url(PoisonMessage)).content.decode()
    assert "the second" in listed
    assert ">ada<" in listed
    assert "the first" not in listed
    assert "of another group" not in listed
    assert "the first" in operator.get(url(PoisonMessage) + group).content.decode()


def test_each_page_takes_its_permission(staff: Callable[..., Client], group: str) -> None:
    canary, note = (url(PoisonMessage, page) + group for page in ("canary", "note"))
    viewer = staff("queueapp.view_poisonmessage")
    text = viewer.get(url(PoisonMessage) + group).content.decode()
    assert "canary" not in text
    assert "Add a note" not in text
    for page in (canary, note):
        assert viewer.post(page, {"confirmed": "yes", "text": "x", "queue": "testapp.Leased"}).status_code == 403
    requeuer = staff("queueapp.view_poisonmessage", "queueapp.requeue_poisonmessage")
    assert (requeuer.get(canary).status_code, requeuer.get(note).status_code) == (200, 403)
    triager = staff("queueapp.view_poisonmessage", "queueapp.change_poisonmessage")
    assert (triager.get(canary).status_code, triager.get(note).status_code) == (403, 200)
    assert not PoisonNote.objects.exists()
