"""The poison messages: list, filters, page, and requeue, archive, restore and delete by one, by group and by queue."""

import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.test import Client

from queueapp.admin import operations
from queueapp.admin.poison import SAMPLE
from queueapp.models import Now, PoisonMessage
from tests.testapp.models import Leased, Urgent

from .conftest import notes, operate, url

ARCHIVED = PoisonMessage.Status.ARCHIVED


def poison(count: int = 1, **values: Any) -> list[int]:
    """Make poison messages; returns their numbers."""
    defaults: dict[str, Any] = {
        "queue": "testapp.Leased",
        "reason": "failed 3 of 3 attempts: ValueError: no gate",
        "exception_type": "ValueError",
        "exception_message": "no gate",
        "traceback": "Traceback (most recent call last):\n  File gate.py\nValueError: no gate",
        "group_key": "a" * 32,
        "consumer": "shop.consumers.board",
        "message_type": "shop.Board",
        "headers": '{"type":"shop.Board","trace-id":"t-1"}',
        "body": b'{"gate":null}',
        "attempts": 3,
        "deliveries": 3,
        "failures": '[{"at":"2026-11-20T19:22:01","attempt":1,"exception":"ValueError: first '
        'try","verdict":"RetryLater"}]',
    }
    return [PoisonMessage.objects.create(message_id=uuid.uuid4(), **{**defaults, **values}).pk for _ in range(count)]


def listed(client: Client, query: str = "") -> list[int]:
    response = client.get(url(PoisonMessage) + query)
    assert response.status_code == 200
    return [row.pk for row in response.context["cl"].result_list]


# -- list and page -------------------------------------------------------------------------------------------------


def test_list_is_newest_first_and_states_what_failed_where(operator: Client) -> None:
    numbers = poison(3)
    assert listed(operator) == numbers[::-1]
    text = operator.get(url(PoisonMessage)).content.decode()
    for expected in ("no gate", "ValueError", "testapp.Leased", "shop.consumers.board", "shop.Board", "aaaaaa"):
        assert expected in text


def test_the_reason_in_a_list_begins_with_the_exception(operator: Client) -> None:
    poison()
    text = operator.get(url(PoisonMessage)).content.decode()
    assert "ValueError: no gate" in text
    assert "failed 3 of 3 attempts" not in text, "the attempts have a column of their own"


def test_unresolved_ones_are_shown_unless_asked_otherwise(operator: Client) -> None:
    (unresolved,), (archived,) = poison(), poison(status=ARCHIVED)
    assert listed(operator) == [unresolved]
    assert listed(operator, "?status=archived") == [archived]
    assert listed(operator, "?status=all") == [archived, unresolved]


def test_filters_by_queue_group_and_exception(operator: Client) -> None:
    (first,) = poison()
    (second,) = poison(queue="testapp.Urgent", exception_type="KeyError", group_key="b" * 32)
    for query, expected in (
        ("?queue=testapp.Urgent", [second]),
        ("?group=" + "a" * 32, [first]),
        ("?exception=KeyError", [second]),
        ("?exception=KeyError&queue=testapp.Leased", []),
        ("?queue=never.Heard", []),
    ):
        assert listed(operator, query) == expected, query


def test_filters_by_type_attempts_and_time(operator: Client) -> None:
    (board,), (gate,) = poison(), poison(message_type="shop.Gate", attempts=1)
    PoisonMessage.objects.filter(pk=gate).update(failed_at=Now() - timedelta(hours=2))
    for query, found in (
        ("?type=shop.Gate", [gate]), ("?attempts=2", [board]), ("?attempts=5", []), ("?failed=hour", [board]),
        ("?failed=day", [gate, board]),
    ):  # fmt: skip
        assert listed(operator, query) == found, query


def test_an_archived_message_says_until_when_it_is_kept(operator: Client) -> None:
    (number,) = poison(status=ARCHIVED, archived_at=Now())
    assert "not before" in operator.get(url(PoisonMessage, "change", number)).content.decode()
    (number,) = poison()
    assert "not before" not in operator.get(url(PoisonMessage, "change", number)).content.decode()


def test_filter_choices_are_bounded(operator: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(30):
        poison(exception_type=f"Error{number}", group_key=f"{number:032}")
    specs = {spec.title: spec for spec in operator.get(url(PoisonMessage)).context["cl"].filter_specs}
    assert {title: len(spec.lookup_choices) for title, spec in specs.items()} == {
        "status": 3, "queue": 1, "group": 20, "exception": 20, "type": 1, "attempts": 4, "failed": 3,
    }  # fmt: skip
    assert SAMPLE == 1000


def test_search(operator: Client) -> None:
    first, second = poison(2)
    message = PoisonMessage.objects.get(pk=first)
    assert listed(operator, f"?q={second}") == [second]
    assert listed(operator, f"?q={message.message_id}") == [first]
    assert listed(operator, f"?q={message.message_id.hex[:9]}") == [first]


def test_page_shows_the_whole_failure(operator: Client) -> None:
    (number,) = poison()
    text = operator.get(url(PoisonMessage, "change", number)).content.decode()
    for expected in (
        "File gate.py",
        "ValueError: first try",
        "retried later",
        "t-1",
        "&quot;gate&quot;: null",
        "Requeue…",
    ):
        assert expected in text
    assert f'<a href="{url(Leased)}">testapp.<wbr>Leased</a>' in text
    assert operator.get(url(PoisonMessage, "body", number)).content == b'{"gate":null}'


def test_page_of_a_message_whose_queue_is_no_more(operator: Client) -> None:
    (number,) = poison(queue="gone.Queue", exception_type="", traceback="", failures=None, body=None)
    text = operator.get(url(PoisonMessage, "change", number)).content.decode()
    assert "gone.Queue" in text
    assert "No body." in text


# -- requeue -------------------------------------------------------------------------------------------------------


def test_requeue_starts_counting_anew_or_leaves_one_more_attempt(operator: Client) -> None:
    anew, kept = poison(2)
    response = operate(operator, PoisonMessage, "requeue", anew, counts="reset")
    assert notes(response) == ["1 message requeued."]
    operate(operator, PoisonMessage, "requeue", kept, counts="keep")
    first, second = Leased.objects.order_by("seq")
    assert (first.deliveries, first.failures, first.body) == (0, None, b'{"gate":null}')
    assert second.deliveries == 2
    assert "first try" in second.failures
    assert listed(operator, "?status=all") == []


def test_requeue_asks_for_the_counts_and_refuses_nonsense(operator: Client) -> None:
    numbers = poison()
    data = {"action": "requeue", "_selected_action": numbers}
    assert "Reset: all attempts" in operator.post(url(PoisonMessage), data).content.decode()
    for counts in ({}, {"counts": "all"}):
        asked_again = operator.post(url(PoisonMessage), {**data, **counts, "confirmed": "yes"})
        assert asked_again.status_code == 200
        assert asked_again.context["form"].errors
    assert not Leased.objects.exists()


def test_requeue_of_a_whole_group_through_the_filter(operator: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "BATCH", 50)
    poison(130)
    rest = poison(2, group_key="b" * 32)
    response = operate(
        operator, PoisonMessage, "requeue", rest[0], query="?group=" + "a" * 32, select_across="1", counts="reset"
    )
    assert notes(response) == ["130 messages requeued."]
    assert Leased.objects.count() == 130
    assert listed(operator) == rest[::-1]
    entry = LogEntry.objects.get()
    assert "130 messages of all that matched group=aaaa" in entry.change_message
    assert "counts: reset" in entry.change_message


def test_requeue_of_a_whole_queue_through_the_filter(operator: Client) -> None:
    poison(3, queue="testapp.Urgent")
    rest = poison()
    operate(
        operator, PoisonMessage, "requeue", rest[0], query="?queue=testapp.Urgent", select_across="1", counts="reset"
    )
    assert (Urgent.objects.count(), Leased.objects.count()) == (3, 0)


def test_messages_whose_queue_is_no_more_stay_and_do_not_hold_up_the_others(operator: Client) -> None:
    gone = poison(2, queue="gone.Queue")
    response = operate(operator, PoisonMessage, "requeue", *gone, *poison(3), counts="reset")
    assert "2 messages not requeued: There is no queue gone.Queue." in notes(response)[0]
    assert notes(response)[1].startswith("3 messages requeued. 2 messages skipped")
    assert listed(operator) == gone[::-1]
    assert Leased.objects.count() == 3


def test_archived_messages_are_not_requeued(operator: Client) -> None:
    numbers = poison(status=ARCHIVED)
    response = operate(operator, PoisonMessage, "requeue", *numbers, query="?status=archived", counts="reset")
    assert notes(response)[0].startswith("0 messages requeued. 1 message skipped")
    assert not Leased.objects.exists()


# -- archive, restore, delete --------------------------------------------------------------------------------------


def test_archive_and_restore(operator: Client) -> None:
    numbers = poison(2)
    assert notes(operate(operator, PoisonMessage, "archive", *numbers)) == ["2 messages archived."]
    assert listed(operator) == []
    assert PoisonMessage.objects.filter(archived_at__isnull=False).count() == 2
    response = operate(operator, PoisonMessage, "restore", numbers[0], query="?status=archived")
    assert notes(response) == ["1 message restored."]
    assert listed(operator) == numbers[:1]
    assert list(LogEntry.objects.values_list("change_message", flat=True).order_by("pk")) == [
        "Archive.", "Archive.", "Restore.",
    ]  # fmt: skip


def test_buttons_of_a_page_lead_to_a_list_that_holds_the_message(operator: Client) -> None:
    for status, expected in (("unresolved", ["requeue", "archive"]), (ARCHIVED, ["restore"])):
        (number,) = poison(status=status)
        buttons = operator.get(url(PoisonMessage, "change", number)).context["buttons"]
        assert [button.operation.name for button in buttons] == [*expected, "delete_selected"]
        for button in buttons:
            data = {"action": button.operation.name, "_selected_action": number}
            assert "1 message?" in operator.post(button.post_to, data).content.decode()


def test_delete(operator: Client) -> None:
    numbers = poison(3)
    assert notes(operate(operator, PoisonMessage, "delete_selected", *numbers[:2])) == ["2 messages deleted."]
    assert listed(operator) == numbers[2:]
    asked = operator.get(url(PoisonMessage, "delete", numbers[2]))
    assert asked.context["post_to"] == url(PoisonMessage)


# -- who may -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("permission", "offered"),
    [
        ("view", set()),
        ("requeue", {"requeue"}),
        ("change", {"archive", "restore"}),
        ("delete", {"delete_selected"}),
    ],
)
def test_operations_are_offered_and_done_by_permission_only(
    staff: Callable[..., Client], permission: str, offered: set[str]
) -> None:
    numbers = poison(2)
    client = staff("queueapp.view_poisonmessage", f"queueapp.{permission}_poisonmessage")
    form = client.get(url(PoisonMessage)).context["action_form"]
    assert {name for name, _ in form.fields["action"].choices if name} == offered if offered else form is None
    buttons = client.get(url(PoisonMessage, "change", numbers[0])).context["buttons"]
    assert {button.operation.name for button in buttons} == offered - {"restore"}
    for name in {"requeue", "archive", "restore", "delete_selected"} - offered:
        data = {"action": name, "_selected_action": numbers, "confirmed": "yes", "counts": "reset"}
        client.post(url(PoisonMessage) + "?status=all", data)
    assert PoisonMessage.objects.filter(status="unresolved").count() == 2
    assert not Leased.objects.exists()
    assert not LogEntry.objects.exists()


def test_without_view_permission_there_is_nothing_to_see(staff: Callable[..., Client]) -> None:
    (number,) = poison()
    client = staff("queueapp.requeue_poisonmessage", "testapp.view_leased")
    addresses = [url(PoisonMessage), *(url(PoisonMessage, page, number) for page in ("change", "body", "history"))]
    assert [client.get(address).status_code for address in addresses] == [403] * 4
