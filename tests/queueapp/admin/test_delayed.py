"""The delayed messages: list, page, dispatch now, cancel."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.test import Client

from queueapp import delayed
from queueapp.models import DelayedMessage, Now, QueueControl
from tests.queueapp.delayed.stores import WholeStore
from tests.testapp.models import Leased, Urgent

from .conftest import notes, operate, url


@pytest.fixture
def numbers(db: None) -> list[int]:
    """One for Urgent in an hour, one for Leased in a minute, one overdue for a queue that is no more."""
    Urgent.send({"n": 1}, delay=timedelta(hours=1), headers={"type": "shop.Remind"})
    Leased.send({"n": 2}, delay=timedelta(minutes=1))
    Leased.send({"n": 3}, delay=timedelta(0))
    found = list(DelayedMessage.objects.order_by("number").values_list("pk", flat=True))
    DelayedMessage.objects.filter(pk=found[2]).update(destination="gone.Queue", due=Now() - timedelta(minutes=5))
    return found


def listed(client: Client, query: str = "") -> list[int]:
    response = client.get(url(DelayedMessage) + query)
    assert response.status_code == 200
    return [row.pk for row in response.context["cl"].result_list]


def test_list_is_in_due_order_and_states_when_and_where_to(operator: Client, numbers: list[int]) -> None:
    assert listed(operator) == numbers[::-1]
    text = operator.get(url(DelayedMessage)).content.decode()
    for expected in ("in 59 min ", "shop.Remind", "testapp.Urgent", "due 5 min ", "gone.Queue", "no such queue"):
        assert expected in text


def test_filters(operator: Client, numbers: list[int]) -> None:
    in_an_hour, in_a_minute, overdue = numbers
    assert listed(operator, "?destination=testapp.Urgent") == [in_an_hour]
    assert listed(operator, "?destination=(no such queue)") == [overdue]
    assert listed(operator, "?when=overdue") == [overdue]
    assert listed(operator, "?when=hour&destination=testapp.Leased") == [in_a_minute]
    assert operator.get(url(DelayedMessage) + "?destination=testapp.Nothing").status_code == 302


def test_search_by_number_id_and_beginning_of_an_id(operator: Client, numbers: list[int]) -> None:
    message = DelayedMessage.objects.get(pk=numbers[0])
    assert listed(operator, f"?q={numbers[0]}") == [numbers[0]]
    assert listed(operator, f"?q={message.message_id}") == [numbers[0]]
    assert numbers[0] in listed(operator, f"?q={str(message.message_id)[:20]}")


def test_page_of_one_message(operator: Client, numbers: list[int]) -> None:
    text = operator.get(url(DelayedMessage, "change", numbers[0])).content.decode()
    for expected in ("Dispatch now…", "Cancel…", "testapp.Urgent", "shop.Remind", "&quot;n&quot;: 1"):
        assert expected in text
    assert operator.get(url(DelayedMessage, "body", numbers[0])).content == b'{"n":1}'


def test_dispatch_now_makes_it_due(operator: Client, numbers: list[int]) -> None:
    assert notes(operate(operator, DelayedMessage, "dispatch_now", numbers[0])) == ["1 message made due."]
    dispatched = delayed.dispatch_due("default", 10)
    assert (dispatched.moved, dispatched.poisoned) == (1, 0), "what goes to no queue of this project stays"
    assert Urgent.objects.count() == 1
    assert LogEntry.objects.get().change_message == "Dispatch now."


def test_reschedule_makes_it_due_later(operator: Client) -> None:
    Leased.send({"n": 1}, delay=timedelta(minutes=1))
    (key,) = DelayedMessage.objects.values_list("pk", flat=True)
    response = operate(operator, DelayedMessage, "reschedule", key, minutes="90")
    assert notes(response) == ["1 message rescheduled."]
    assert DelayedMessage.objects.filter(due__gt=Now() + timedelta(minutes=89)).exists()


def test_cancel_deletes_it(operator: Client, numbers: list[int]) -> None:
    response = operate(operator, DelayedMessage, "delete_selected", *numbers[:2])
    assert notes(response) == ["2 messages cancelled."]
    assert listed(operator) == numbers[2:]


def test_one_that_was_dispatched_meanwhile_is_left_alone(operator: Client, numbers: list[int]) -> None:
    data = {"action": "delete_selected", "_selected_action": numbers, "confirmed": "yes"}
    DelayedMessage.objects.filter(pk=numbers[0]).delete()
    assert notes(operator.post(url(DelayedMessage), data, follow=True)) == [
        "2 messages cancelled. 1 message skipped: dispatched or cancelled meanwhile."
    ]


@pytest.mark.parametrize(
    ("permission", "offered"),
    [
        ("view", set()),
        ("change", {"dispatch_now", "reschedule"}),
        ("delete", {"delete_selected"}),
    ],
)
def test_operations_are_offered_by_permission(
    staff: Callable[..., Client], numbers: list[int], permission: str, offered: set[str]
) -> None:
    client = staff("queueapp.view_delayedmessage", f"queueapp.{permission}_delayedmessage")
    form = client.get(url(DelayedMessage)).context["action_form"]
    assert {name for name, _ in form.fields["action"].choices if name} == offered if offered else form is None
    buttons = client.get(url(DelayedMessage, "change", numbers[0])).context["buttons"]
    assert {button.operation.name for button in buttons} == offered
    before = listed(client)
    for operation in {"dispatch_now", "delete_selected"} - offered:
        client.post(url(DelayedMessage), {"action": operation, "_selected_action": numbers, "confirmed": "yes"})
    assert listed(client) == before
    assert not LogEntry.objects.exists()


def test_no_user_can_add_or_edit_a_delayed_message(operator: Client, numbers: list[int]) -> None:
    assert operator.get(url(DelayedMessage, "add")).status_code == 403
    assert operator.post(url(DelayedMessage, "change", numbers[0]), {"destination": "x"}).status_code == 403


@pytest.fixture
def other_store(settings: Any) -> None:
    """What is sent with a delay is kept by a store of a third party."""
    WholeStore.reset()
    settings.QUEUEAPP = {"DELAYED_STORE": "tests.queueapp.delayed.stores.WholeStore"}


@pytest.mark.usefixtures("other_store")
def test_a_list_that_is_not_all_of_them_names_who_keeps_the_others(operator: Client) -> None:
    Leased.send({}, delay=timedelta(hours=1))

    response = operator.get(url(DelayedMessage))

    assert not response.context["cl"].result_count
    (note,) = notes(response)
    assert "in the store tests.queueapp.delayed.stores.WholeStore, not in this list" in note
    overview = operator.get(url(QueueControl)).context["lines"]
    (line,) = [item["row"] for item in overview if item["row"].label == "testapp.Leased"]
    assert line.delayed == "1", "the overview asks the store"


def test_a_list_of_all_has_no_note(operator: Client) -> None:
    Leased.send({}, delay=timedelta(hours=1))
    assert notes(operator.get(url(DelayedMessage))) == []


def test_a_store_that_is_none_does_not_break_the_list(operator: Client, settings: Any) -> None:
    settings.QUEUEAPP = {"DELAYED_STORE": "shop.nowhere.Store"}
    (note,) = notes(operator.get(url(DelayedMessage)))
    assert "shop.nowhere.Store" in note
