"""Operations in the background: started from a list, shown on a page of their own, controlled by who may."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth import get_user_model
from django.test import Client

from queueapp.admin import operations
from queueapp.models import MAINTENANCE, BulkOperation, Now, PoisonMessage, QueueControl, Subscriber
from queueapp.operations import bulk_operations
from tests.bulk_rows import fill_up
from tests.testapp.models import Leased, Transactional

from .conftest import notes, operate, url

GROUP = "a" * 32


@pytest.fixture
def few_in_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "IN_REQUEST", 5)


def bury(count: int, **values: Any) -> int:
    """Make poison messages; returns the number of the newest one."""
    defaults = {"queue": "testapp.Leased", "reason": "failed", "group_key": GROUP, "headers": "{}", "body": b"{}"}
    fill_up(PoisonMessage(message_id=uuid.uuid4(), **{**defaults, **values}), count)
    return int(PoisonMessage.objects.order_by("-number").values_list("number", flat=True)[0])


def requeue_group(client: Client, **more: Any) -> Any:
    newest = bury(12)
    bury(3, group_key="b" * 32)
    data = {"counts": "reset", "select_across": "1", **more}
    return operate(client, PoisonMessage, "requeue", newest, query=f"?group={GROUP}", **data)


def started(**values: Any) -> BulkOperation:
    defaults = {"action": "requeue", "source": "queueapp.PoisonMessage", "first": 1, "last": 100, "cursor": 50}
    return BulkOperation.objects.create(**{**defaults, **values})


def test_a_whole_group_becomes_an_operation_and_its_page_follows(operator: Client, few_in_request: None) -> None:
    response = requeue_group(operator, rate="50")

    operation = BulkOperation.objects.get()
    assert notes(response) == [f"Operation {operation.pk} has started."]
    assert response.request["PATH_INFO"] == url(BulkOperation, "change", operation.pk)
    assert PoisonMessage.objects.count() == 15, "nothing is done in the request"
    assert (operation.username, operation.rate, json.loads(operation.filters)) == ("operator", 50, {"group": GROUP})
    assert LogEntry.objects.get().change_message == (
        f"Requeue, counts: reset, rate: 50.0: started operation {operation.pk} on all that matched group={GROUP}"
    )

    bulk_operations.set_rate(operation.pk, None)
    bulk_operations.carry_out("default")
    text = operator.get(url(BulkOperation, "change", operation.pk)).content.decode()
    assert ">finished</span>" in text
    assert "100 %" in text
    assert Leased.objects.count() == 12
    assert operator.get(url(BulkOperation)).context["cl"].result_count == 1


def test_few_messages_are_done_in_the_request(operator: Client) -> None:
    assert notes(requeue_group(operator)) == ["12 messages requeued."]
    assert not BulkOperation.objects.exists()


def test_the_confirm_page_says_that_it_is_done_in_the_background_and_asks_for_the_rate(
    operator: Client, few_in_request: None
) -> None:
    newest = bury(12)
    data = {"action": "requeue", "_selected_action": newest, "select_across": "1"}
    text = operator.post(url(PoisonMessage) + f"?group={GROUP}", data).content.decode()
    assert "in the background" in text
    assert 'name="rate"' in text
    assert not BulkOperation.objects.exists()


def test_a_search_is_done_in_the_request_for_no_filter_says_what_it_found(
    operator: Client, few_in_request: None
) -> None:
    newest = bury(12, reason="no gate")
    response = operate(
        operator, PoisonMessage, "archive", newest, query="?q=error:gate", select_across="1"
    )  # fmt: skip
    assert notes(response)[-1] == "12 messages archived."


def test_purge_deletes_one_batch_and_the_rest_in_the_background(operator: Client, settings: Any) -> None:
    settings.QUEUEAPP = {**settings.QUEUEAPP, "PURGE_BATCH": 10}
    Transactional.send_many({"n": n} for n in range(25))
    address = url(QueueControl, "purge", "testapp.Transactional")
    response = operator.post(address, {"confirmed": "yes"}, follow=True)
    number = BulkOperation.objects.get().pk
    assert notes(response) == [
        f"10 messages of testapp.Transactional deleted. Operation {number} deletes the rest in the background."
    ]
    bulk_operations.carry_out("default")
    assert not Transactional.objects.exists()


# -- the page ------------------------------------------------------------------------------------------------------


def test_the_page_shows_who_what_how_many_and_what_failed(operator: Client) -> None:
    operation = started(
        username="ada<b>", filters=json.dumps({"group": GROUP}), changed=1200, skipped=3, failed=1,
        errors=json.dumps([[7, "ValueError: <script>"]]), rate=20,
    )  # fmt: skip
    text = operator.get(url(BulkOperation, "change", operation.pk)).content.decode()
    texts = ("ada&lt;b&gt;", "1,200", "3 (in flight, or gone)", "ValueError: &lt;script&gt;", "at most 20 a second")
    for shown in (*texts, f"{url(PoisonMessage)}?group={GROUP}"):
        assert shown in text
    assert "It waits for maintenance" in text
    Subscriber.objects.create(
        queue=MAINTENANCE, host="h", process=1, supervisor=uuid.uuid4(), alive_until=Now() + timedelta(minutes=1)
    )
    assert "It waits for maintenance" not in operator.get(url(BulkOperation, "change", operation.pk)).content.decode()


def test_pause_resume_rate_and_stop_are_buttons_and_logged(operator: Client) -> None:
    operation = started()

    def press(verb: str, **data: Any) -> tuple[str, list[str]]:
        response = operator.post(url(BulkOperation, verb, operation.pk), data, follow=True)
        operation.refresh_from_db()
        return operation.state, notes(response)

    assert press("pause") == ("paused", [f"Operation {operation.pk} is paused."])
    assert press("pause")[1] == [f"Nothing was changed: operation {operation.pk} has ended, or is it already."]
    assert press("resume") == ("running", [f"Operation {operation.pk} is running again."])
    press("rate", rate="7")
    assert operation.rate == 7
    assert press("stop") == ("stopped", [f"Operation {operation.pk} is stopped."])
    assert press("resume")[0] == "stopped"
    assert list(LogEntry.objects.order_by("pk").values_list("change_message", flat=True)) == [
        "Pause.", "Resume.", "Rate.", "Stop.",
    ]  # fmt: skip
    history = operator.get(url(BulkOperation, "history", operation.pk)).content.decode()
    assert "Pause." in history
    assert operator.get(url(BulkOperation, "pause", operation.pk)).status_code == 405


def test_every_page_of_an_operation_is_an_error_page_without_one(operator: Client) -> None:
    for key in (4711, "x", "nowhere:1"):
        assert operator.get(url(BulkOperation, "change", key)).status_code == 404
        assert operator.post(url(BulkOperation, "stop", key)).status_code == 404


def test_operations_are_controlled_by_who_may(staff: Callable[..., Client]) -> None:
    operation = started()
    page, stop = url(BulkOperation, "change", operation.pk), url(BulkOperation, "stop", operation.pk)
    viewer, changer, visitor = (
        staff("queueapp.view_bulkoperation"), staff("queueapp.change_bulkoperation"), staff("testapp.view_leased"),
    )  # fmt: skip
    assert (viewer.get(page).status_code, viewer.post(stop).status_code) == (200, 403)
    assert "Stop</button>" not in viewer.get(page).content.decode()
    assert (visitor.get(page).status_code, visitor.post(stop).status_code) == (403, 403)
    assert visitor.get(url(BulkOperation)).status_code == 403

    BulkOperation.objects.update(started_by=get_user_model().objects.get(username="staff2"))
    assert visitor.get(page).status_code == 200, "its own user sees it"
    assert "Stop</button>" in visitor.get(page).content.decode()
    assert changer.post(stop).status_code == 302
    operation.refresh_from_db()
    assert operation.state == "stopped"
    assert changer.get(url(BulkOperation, "delete", operation.pk)).status_code == 403
