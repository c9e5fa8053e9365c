"""Operations on waiting messages, and the one way through which all operations go."""

import json
import re
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.admin.models import DELETION, LogEntry
from django.contrib.auth import get_user_model
from django.core.exceptions import PermissionDenied
from django.db import OperationalError
from django.test import Client, RequestFactory

from queueapp.admin import operations
from queueapp.models import Now, PoisonMessage, QueueControl, Subscriber
from queueapp.operations import control
from tests.testapp.models import Leased, Transactional

from .conftest import notes, operate, url


@pytest.fixture
def seqs(db: None) -> list[int]:
    """Three ready messages and a leased one."""
    Leased.send_many({"n": n} for n in range(4))
    found = list(Leased.objects.values_list("pk", flat=True))
    Leased.objects.filter(pk=found[-1]).update(
        lease_token=uuid.uuid4(), lease_owner=uuid.uuid4(), lease_expires=Now() + timedelta(minutes=5), deliveries=1
    )
    return found


def remaining(queue: Any = Leased) -> list[int]:
    return list(queue.objects.order_by("pk").values_list("pk", flat=True))


@pytest.mark.parametrize("operation", ["delete_selected", "move_to_poison", "release_lease"])
def test_an_operation_asks_for_its_permission_when_it_is_carried_out(seqs: list[int], operation: str) -> None:
    """Django offers its action to no user without the permission; a page of a project's own may."""
    page = admin.site._registry[Leased]
    (action,) = (action for action in page.actions if action.__name__ == operation)
    request = RequestFactory().post("/", {"action": operation, "_selected_action": seqs, "confirmed": "yes"})
    request.user = get_user_model().objects.create_user("visitor", is_staff=True)

    with pytest.raises(PermissionDenied):
        action(page, request, Leased.objects.all())

    assert remaining() == seqs


# -- the confirm page ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operation", "question"),
    [
        ("delete_selected", "Delete 4 messages?"),
        ("move_to_poison", "Move 4 messages to poison?"),
        ("release_lease", "Release the lease of 4 messages?"),
    ],
)
def test_asking_changes_nothing_and_shows_how_many_and_which(
    operator: Client, seqs: list[int], operation: str, question: str
) -> None:
    response = operator.post(url(Leased), {"action": operation, "_selected_action": seqs})
    text = response.content.decode()
    assert question in text
    assert all(str(message.id) in text for message in Leased.objects.all())
    assert remaining() == seqs
    assert not PoisonMessage.objects.exists()
    assert Leased.objects.filter(lease_token__isnull=False).count() == 1
    assert not LogEntry.objects.exists()


def test_confirm_page_can_be_answered_as_it_is_rendered(operator: Client, seqs: list[int]) -> None:
    asked = operator.post(url(Leased), {"action": "delete_selected", "_selected_action": seqs[:2]}).content.decode()
    form = re.search(r'<form method="post" action="([^"]+/leased/)">(.*?)</form>', asked, re.DOTALL)
    fields = re.findall(r'<input type="hidden" name="([^"]+)" value="([^"]*)">', form[2])
    data: dict[str, list[str]] = {}
    for name, value in fields:
        data.setdefault(name, []).append(value)
    operator.post(form[1], data)
    assert remaining() == seqs[2:]


def test_every_post_needs_a_csrf_token(operator: Client, seqs: list[int]) -> None:
    strict = Client(enforce_csrf_checks=True)
    strict.force_login(get_user_model().objects.get())
    data = {"action": "delete_selected", "_selected_action": seqs, "confirmed": "yes"}
    assert strict.post(url(Leased), data).status_code == 403
    assert remaining() == seqs


def test_get_never_changes_anything(operator: Client, seqs: list[int]) -> None:
    query = f"?action=delete_selected&_selected_action={seqs[0]}&confirmed=yes"
    operator.get(url(Leased) + query)
    operator.get(url(Leased, "delete", seqs[0]) + "?confirmed=yes")
    assert remaining() == seqs


def test_delete_page_of_one_message_asks_and_leads_through_the_operation(operator: Client, seqs: list[int]) -> None:
    asked = operator.get(url(Leased, "delete", seqs[0]))
    assert asked.context["post_to"] == url(Leased)
    assert ("_selected_action", seqs[0]) in asked.context["hidden"]
    operator.post(url(Leased, "delete", seqs[0]), {"post": "yes"})
    assert remaining() == seqs


# -- what they do --------------------------------------------------------------------------------------------------


def test_delete_leaves_the_leased_one_and_reports_it(operator: Client, seqs: list[int]) -> None:
    response = operate(operator, Leased, "delete_selected", *seqs)
    assert notes(response) == ["3 messages deleted. 1 message skipped: leased, locked by a receiver, or gone."]
    assert remaining() == seqs[3:]


def test_release_lease_frees_the_leased_one(operator: Client, seqs: list[int]) -> None:
    assert notes(operate(operator, Leased, "release_lease", seqs[3])) == ["1 message released."]
    row = Leased.objects.get(pk=seqs[3])
    assert (row.lease_token, row.lease_expires, row.deliveries) == (None, None, 1)


@pytest.mark.django_db(transaction=True)  # a request is committed beside the transaction of its caller
def test_stop_its_handler_asks_the_live_workers_of_the_queue(operator: Client, seqs: list[int]) -> None:
    alone = "1 message skipped: gone, or without a live worker."
    assert alone in notes(operate(operator, Leased, "stop_handler", seqs[3]))[0]
    Subscriber.objects.create(
        queue="testapp.Leased", host="h", process=1, supervisor=uuid.uuid4(), alive_until=Now() + timedelta(minutes=1)
    )
    assert notes(operate(operator, Leased, "stop_handler", seqs[3])) == ["1 message asked to stop."]
    [asked] = json.loads(QueueControl.objects.get(queue="testapp.Leased").cancelling)
    assert asked["id"] == str(Leased.objects.get(pk=seqs[3]).id)
    assert asked["reason"].startswith("by ")


def test_move_to_poison_names_who_did_it(operator: Client, seqs: list[int]) -> None:
    assert notes(operate(operator, Leased, "move_to_poison", *seqs[:2])) == ["2 messages moved to poison."]
    assert remaining() == seqs[2:]
    assert set(PoisonMessage.objects.values_list("queue", "reason")) == {
        ("testapp.Leased", "moved to poison by operator")
    }


def test_select_all_takes_what_matched_when_it_was_asked_and_nothing_newer(operator: Client) -> None:
    Transactional.send_many({"n": n} for n in range(5))
    address, data = url(Transactional), {"action": "delete_selected", "_selected_action": remaining(Transactional)[:1]}
    asked = operator.post(address, {**data, "select_across": "1"})
    assert "5 messages?" in asked.content.decode()
    Transactional.send({"n": "new"})
    hidden = dict(asked.context["hidden"])
    response = operator.post(address, {**hidden, "confirmed": "yes"}, follow=True)
    assert notes(response) == ["5 messages deleted."]
    assert len(remaining(Transactional)) == 1


def test_select_all_keeps_to_the_filter(operator: Client, seqs: list[int]) -> None:
    response = operate(operator, Leased, "release_lease", seqs[3], query="?state=leased", select_across="1")
    assert notes(response) == ["1 message released."]
    operate(operator, Leased, "delete_selected", seqs[0], query="?delivered=yes", select_across="1")
    assert remaining() == seqs[:3]


def test_many_messages_are_done_in_batches(operator: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "BATCH", 7)
    Transactional.send_many({"n": n} for n in range(150))
    first = remaining(Transactional)[0]
    response = operate(operator, Transactional, "delete_selected", first, select_across="1")
    assert notes(response) == ["150 messages deleted."]
    assert remaining(Transactional) == []


def test_an_operation_stops_when_its_time_is_over_and_reports_it(
    operator: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "BATCH", 7)
    monkeypatch.setattr(operations, "TIME", timedelta(0))
    Transactional.send_many({"n": n} for n in range(20))
    response = operate(operator, Transactional, "delete_selected", remaining(Transactional)[0], select_across="1")
    assert notes(response) == [
        "7 messages deleted. Stopped after 0 seconds; there are more messages: repeat the operation for the rest."
    ]
    assert len(remaining(Transactional)) == 13


@pytest.mark.django_db(transaction=True)
def test_an_operation_that_the_database_stops_is_logged_and_reported_as_far_as_it_went(
    operator: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    really, calls = control.delete, []

    def fail_the_second_time(*args: Any, **options: Any) -> int:
        calls.append(args)
        if len(calls) == 2:
            raise OperationalError("deadlock detected")
        return really(*args, **options)

    monkeypatch.setattr(operations, "BATCH", 7)
    monkeypatch.setattr(control, "delete", fail_the_second_time)
    Transactional.send_many({"n": n} for n in range(20))
    response = operate(operator, Transactional, "delete_selected", remaining(Transactional)[0], select_across="1")
    assert notes(response) == [
        "7 messages deleted. Stopped by the database (OperationalError): repeat the operation for the rest."
    ]
    assert len(remaining(Transactional)) == 13
    assert LogEntry.objects.get().object_repr == "7 messages"


def test_within_the_transaction_of_a_request_the_database_stops_all_of_it(
    operator: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ATOMIC_REQUESTS nothing before it is committed: to say that it was would be untrue."""

    def fail(*args: Any, **options: Any) -> int:
        raise OperationalError("deadlock detected")

    monkeypatch.setattr(control, "delete", fail)
    Transactional.send({})
    with pytest.raises(OperationalError):
        operate(operator, Transactional, "delete_selected", *remaining(Transactional))


# -- who may -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("permission", "offered"),
    [
        ("view_leased", set()),
        ("change_leased", {"release_lease", "stop_handler", "move_to_poison"}),
        ("delete_leased", {"delete_selected"}),
        ("add_leased", set()),
    ],
)
def test_operations_are_offered_by_permission(
    staff: Callable[..., Client], seqs: list[int], permission: str, offered: set[str]
) -> None:
    client = staff("testapp.view_leased", f"testapp.{permission}")
    form = client.get(url(Leased)).context["action_form"]
    choices = {name for name, _ in form.fields["action"].choices if name} if form else set()
    assert choices == offered
    buttons = client.get(url(Leased, "change", seqs[3])).context["buttons"]
    assert {button.operation.name for button in buttons} == offered


@pytest.mark.parametrize("operation", ["delete_selected", "move_to_poison", "release_lease", "stop_handler"])
def test_a_forged_operation_without_permission_changes_nothing(
    staff: Callable[..., Client], seqs: list[int], operation: str
) -> None:
    viewer = staff("testapp.view_leased")
    data = {"action": operation, "_selected_action": seqs, "confirmed": "yes"}
    viewer.post(url(Leased), data, follow=True)
    staff().post(url(Leased), data)
    assert remaining() == seqs
    assert Leased.objects.filter(lease_token__isnull=False).count() == 1
    assert not LogEntry.objects.exists()
    assert not QueueControl.objects.exists()
    assert viewer.get(url(Leased, "delete", seqs[0])).status_code == 403


def test_release_is_offered_only_on_the_page_of_a_leased_message(operator: Client, seqs: list[int]) -> None:
    names = {
        seq: [button.operation.name for button in operator.get(url(Leased, "change", seq)).context["buttons"]]
        for seq in (seqs[0], seqs[3])
    }
    assert names == {
        seqs[0]: ["move_to_poison", "delete_selected"],
        seqs[3]: ["release_lease", "stop_handler", "move_to_poison", "delete_selected"],
    }


# -- the log -------------------------------------------------------------------------------------------------------


def test_a_few_messages_are_logged_one_by_one(operator: Client, seqs: list[int]) -> None:
    operate(operator, Leased, "delete_selected", *seqs[:2])
    entries = LogEntry.objects.all()
    assert {(e.object_id, e.action_flag, e.change_message) for e in entries} == {
        (str(seq), DELETION, "Delete.") for seq in seqs[:2]
    }
    assert {entry.user.get_username() for entry in entries} == {"operator"}


def test_many_messages_are_one_log_entry_with_filter_and_count(operator: Client) -> None:
    Leased.send_many({"n": n} for n in range(130))
    operate(operator, Leased, "delete_selected", remaining()[0], query="?state=ready", select_across="1")
    entry = LogEntry.objects.get()
    assert entry.object_repr == "130 messages"
    assert entry.change_message == "Delete: 130 messages of all that matched state=ready"


def test_a_log_entry_is_as_long_as_it_may_be_whatever_the_address_was(operator: Client, seqs: list[int]) -> None:
    query = f"?state=ready&seq__gte={'0' * 4200}"
    operate(operator, Leased, "delete_selected", seqs[0], query=query, select_across="1")
    assert len(LogEntry.objects.get().change_message) == 4000


def test_when_some_are_left_alone_the_log_states_how_many_were_done(operator: Client, seqs: list[int]) -> None:
    operate(operator, Leased, "delete_selected", *seqs)
    entry = LogEntry.objects.get()
    assert entry.change_message == f"Delete: 3 messages of {', '.join(map(str, seqs))}"


def test_nothing_done_is_not_logged(operator: Client, seqs: list[int]) -> None:
    operate(operator, Leased, "delete_selected", seqs[3])
    assert not LogEntry.objects.exists()


def test_history_page_of_a_message_shows_its_entries(operator: Client, seqs: list[int]) -> None:
    operate(operator, Leased, "release_lease", seqs[3])
    assert "Release lease." in operator.get(url(Leased, "history", seqs[3])).content.decode()


@pytest.mark.parametrize(("as_list", "tag"), [(True, '<ol class="breadcrumbs">'), (False, '<div class="breadcrumbs">')])
def test_breadcrumbs_have_the_markup_of_the_installed_django(
    operator: Client, monkeypatch: pytest.MonkeyPatch, as_list: bool, tag: str
) -> None:
    monkeypatch.setattr("django.VERSION", (6, 1, 0, "final", 0) if as_list else (5, 2, 0, "final", 0))
    Leased.send({})
    (key,) = Leased.objects.values_list("pk", flat=True)
    text = operator.post(url(Leased), {"action": "delete_selected", "_selected_action": [key]}).content.decode()
    assert text.count(tag) == 1
    assert ('<li aria-current="page">Delete 1 message?</li>' in text) == as_list
    assert f'<a href="{url(Leased)}">' in text
