"""Two operators who have the same message, or the same queue, on their screens and press at once."""

from __future__ import annotations

import contextlib
import re
import threading
import uuid
from datetime import timedelta
from html import unescape
from io import StringIO
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth import get_user_model
from django.core.management import CommandError, call_command
from django.db import connections
from django.http import HttpResponse
from django.test import Client
from django.urls import reverse

from queueapp import delayed
from queueapp.failures import poison_operations
from queueapp.models import DelayedMessage, PoisonMessage, QueueControl
from queueapp.operations import control
from tests.queueapp.failures.test_requeueing import other_session
from tests.testapp.models import Capped, Leased, Urgent

from .conftest import url

pytestmark = pytest.mark.django_db(transaction=True)
LATER = timedelta(days=1)


@pytest.fixture
def both() -> tuple[Client, Client]:
    """Two operators, each with a browser."""
    browsers = []
    for name in ("ada", "ben"):
        browsers.append(Client())
        browsers[-1].force_login(get_user_model().objects.create_superuser(name, password="x"))
    first, second = browsers
    return first, second


def buried(count: int = 1) -> list[int]:
    return [
        PoisonMessage.objects.create(
            message_id=uuid.uuid4(), queue="testapp.Leased", reason="failed", headers="{}", body=b"{}"
        ).pk
        for _ in range(count)
    ]


def notes(response: HttpResponse) -> list[str]:
    """What its page tells the operator. From the page itself: what a test client remembers of templates is of both
    browsers."""
    return [
        unescape(item)
        for item in re.findall(r'<li class="(?:info|success|warning|error)">(.*?)</li>', response.content.decode())
    ]


def press(browser: Client, model: Any, verb: str, *keys: int) -> HttpResponse:
    """Say yes on the confirm page."""
    data = {"action": verb, "_selected_action": keys, "confirmed": "yes", "counts": "reset"}
    return browser.post(url(model), data, follow=True)


def at_once(*acts: Any) -> list[Any]:
    """What each of them returned, pressed in the same moment."""
    start = threading.Barrier(len(acts))
    done: list[Any] = [None] * len(acts)

    def run(place: int) -> None:
        start.wait(30)
        try:
            done[place] = acts[place]()
        finally:
            connections.close_all()

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(acts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return done


def changed(response: HttpResponse) -> tuple[int, int]:
    """(done, left alone) of one operation, as the page reports it."""
    assert response.status_code == 200
    (note,) = notes(response)
    found = re.fullmatch(r"(\d) messages? \w+(?: \w+)?\.(?: (\d) messages? skipped: .+\.)?", note)
    assert found, note
    return int(found[1]), int(found[2] or 0)


# -- poison --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("second", ["requeue", "delete_selected", "archive"])
def test_of_two_operators_on_a_poison_message_the_second_gets_a_message(
    both: tuple[Client, Client], second: str
) -> None:
    for number in buried(3):
        answers = at_once(
            lambda key=number: press(both[0], PoisonMessage, "requeue", key),
            lambda key=number: press(both[1], PoisonMessage, second, key),
        )
        assert sorted(map(changed, answers)) == [(0, 1), (1, 0)]
    remaining = PoisonMessage.objects.count()
    ids = list(Leased.objects.values_list("id", flat=True))
    assert len(set(ids)) == len(ids)
    deleted = 0 if second != "delete_selected" else 3 - remaining - len(ids)
    assert len(ids) + remaining + deleted == 3
    assert remaining == 0 or second == "archive"


def test_what_a_colleague_is_just_requeueing_is_left_to_him(both: tuple[Client, Client]) -> None:
    (number,) = buried()
    with other_session(lambda: poison_operations.requeue(poison_operations.find([number]))):
        answer = press(both[0], PoisonMessage, "requeue", number)
    assert notes(answer) == [
        "0 messages requeued. 1 message skipped: archived, requeued or deleted meanwhile, or their queue does not "
        "exist any more."
    ]
    assert Leased.objects.count() == 1


def test_confirmation_for_a_message_that_is_gone_reports_it_and_does_not_ask(both: tuple[Client, Client]) -> None:
    gone, remaining = buried(2)
    poison_operations.requeue(poison_operations.find([gone]))
    data = {"action": "requeue", "_selected_action": [gone]}
    answer = both[0].post(url(PoisonMessage), data, follow=True)
    assert notes(answer) == [
        "0 messages requeued. 1 message skipped: archived, requeued or deleted meanwhile, or their queue does not "
        "exist any more."
    ]
    asked = both[0].post(url(PoisonMessage), {"action": "requeue", "_selected_action": [gone, remaining]})
    assert "Requeue 1 message?" in asked.content.decode()
    assert changed(press(both[0], PoisonMessage, "requeue", gone, remaining)) == (1, 1)
    page = both[1].get(url(PoisonMessage, "change", gone), follow=True)
    assert notes(page) == [f"Message {gone} is gone: it was handled, moved or deleted."]


def test_requeued_here_and_elsewhere_it_goes_to_one_of_the_two(both: tuple[Client, Client]) -> None:
    def elsewhere(number: int) -> bool:
        out = StringIO()
        with contextlib.suppress(CommandError):
            call_command("requeuepoison", str(number), "--to", "testapp.Urgent", stdout=out)
            return True
        assert out.getvalue() == "0 poison messages were requeued.\n"
        return False

    for number in buried(3):
        answer, went = at_once(
            lambda key=number: press(both[0], PoisonMessage, "requeue", key), lambda key=number: elsewhere(key)
        )
        assert changed(answer) == ((0, 1) if went else (1, 0))
    assert Leased.objects.count() + Urgent.objects.count() == 3
    assert not PoisonMessage.objects.exists()


def test_requeuepoison_states_of_what_another_operator_has_changed_that_it_changed() -> None:
    second, product = buried(2)
    with (
        other_session(lambda: poison_operations.requeue(poison_operations.find([second]), to=Urgent)),
        pytest.raises(CommandError, match=r"^1 selected message changed meanwhile \(see listpoison\)\.$"),
    ):
        call_command("requeuepoison", str(second), str(product), stdout=StringIO())
    assert (Leased.objects.count(), Urgent.objects.count()) == (1, 1)


def test_edited_and_requeued_at_once_one_copy_goes(both: tuple[Client, Client]) -> None:
    for number in buried(3):
        form = {"headers": "{}", "body": '{"mended":1}'}
        edited, requeued = at_once(
            lambda key=number, data=form: both[0].post(url(PoisonMessage, "edit", key), data, follow=True),
            lambda key=number: press(both[1], PoisonMessage, "requeue", key),
        )
        (note,) = notes(edited)
        if changed(requeued) == (1, 0):
            assert re.search(f"{number} is (gone|no longer unresolved)", note)
        else:
            assert note.startswith("The edited message was requeued as")
    assert Leased.objects.count() == 3


# -- delayed and waiting messages -----------------------------------------------------------------------------------


def test_a_delayed_message_cancelled_twice_or_made_due_meanwhile_goes_one_way(both: tuple[Client, Client]) -> None:
    for second in ("delete_selected", "dispatch_now"):
        Leased.send({}, delay=LATER)
        number = DelayedMessage.objects.get().pk
        cancelled, following = at_once(
            lambda key=number: press(both[0], DelayedMessage, "delete_selected", key),
            lambda key=number, verb=second: press(both[1], DelayedMessage, verb, key),
        )
        done = sorted(map(changed, (cancelled, following)))
        # Made due and cancelled after that is no contradiction.
        assert done == [(0, 1), (1, 0)] or (second == "dispatch_now" and done == [(1, 0), (1, 0)])
        assert not DelayedMessage.objects.exists()
    assert not Leased.objects.exists()


def test_cancelled_and_rescheduled_at_once_a_delayed_message_is_gone_without_an_error() -> None:
    for _ in range(3):
        identity = Leased.send({}, delay=LATER, expires_in=LATER)
        cancelled, again, rescheduled = at_once(
            lambda key=identity: delayed.cancel(key),
            lambda key=identity: delayed.cancel(key),
            lambda key=identity: delayed.reschedule(key, delay=2 * LATER),
        )
        assert sorted((cancelled, again)) == [0, 1]
        assert rescheduled in (0, 1)
        assert not DelayedMessage.objects.exists()


def test_rescheduled_twice_at_once_it_expires_as_long_after_its_end_as_before() -> None:
    identity = Leased.send({}, delay=LATER, expires_in=timedelta(hours=1))
    before = DelayedMessage.objects.get()
    assert at_once(*[lambda n=n: delayed.reschedule(identity, delay=n * LATER) for n in (2, 3, 4)]) == [1, 1, 1]
    row = DelayedMessage.objects.get()
    assert row.expires is not None
    assert row.due - before.due > LATER / 2
    assert row.expires - row.due == before.expires - before.due


def test_a_waiting_message_that_both_take_away_goes_one_way(both: tuple[Client, Client]) -> None:
    Leased.send_many([{}] * 3)
    for number in Leased.objects.values_list("pk", flat=True):
        answers = at_once(
            lambda key=number: press(both[0], Leased, "move_to_poison", key),
            lambda key=number: press(both[1], Leased, "delete_selected", key),
        )
        reported = [notes(answer)[0] for answer in answers]
        assert sum(notification.startswith("1 message ") for notification in reported) == 1, reported
        assert sum("1 message skipped" in notification for notification in reported) == 1, reported
    assert not Leased.objects.exists()


# -- queues ----------------------------------------------------------------------------------------------------------


def test_a_queue_that_both_pause_is_paused_once_and_the_second_operator_gets_a_message() -> None:
    assert sorted(at_once(*[lambda: control.pause(Leased)] * 2)) == [False, True]
    assert sorted(at_once(*[lambda: control.resume(Leased)] * 2)) == [False, True]


def test_paused_while_its_limits_are_set_it_has_both(both: tuple[Client, Client]) -> None:
    pause, limits = (
        reverse(f"admin:queueapp_queuecontrol_{verb}", args=[Capped._meta.label]) for verb in ("pause", "limits")
    )
    answers = at_once(
        lambda: both[0].post(pause, {"confirmed": "yes"}),
        lambda: both[1].post(limits, {"confirmed": "yes", "max_backlog": "3"}),
    )
    assert [answer.status_code for answer in answers] == [302, 302]
    row = QueueControl.objects.get()
    assert (row.paused, row.max_backlog) == (True, 3)


def test_limits_that_a_colleague_set_while_the_form_was_open_are_not_undone(both: tuple[Client, Client]) -> None:
    control.set_option(Capped, "max_backlog", 7)
    address = reverse("admin:queueapp_queuecontrol_limits", args=[Capped._meta.label])
    shown = both[0].post(address).content.decode()
    fields = dict(
        re.findall(r'<input[^>]*? name="((?:initial-)?(?:max_backlog|lease_period))"(?: value="([^"]*)")?', shown)
    )
    assert fields["initial-max_backlog"] == fields["max_backlog"] == "7"

    both[1].post(address, {"confirmed": "yes", "max_backlog": "3", "lease_period": ""})
    both[0].post(address, fields | {"confirmed": "yes", "lease_period": "0:01:30"})

    row = QueueControl.objects.get()
    assert (row.max_backlog, str(row.lease_period)) == (3, "0:01:30")
    reported = list(LogEntry.objects.filter(user__username="ada").values_list("change_message", flat=True))
    assert reported == ["lease_period set to 0:01:30."]
