"""What commands refuse before they do anything, and what they say of what they did when they are stopped."""

from __future__ import annotations

import re
import uuid
from datetime import timedelta
from io import StringIO
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from queueapp.models import DelayedMessage, PoisonMessage, QueueControl
from tests.testapp.models import Leased

pytestmark = pytest.mark.django_db

WORKER = "workers.management.commands.runqueueworker"


def bury(**fields: Any) -> PoisonMessage:
    return PoisonMessage.objects.create(**{"queue": "testapp.Leased", "reason": "r"} | fields, message_id=uuid.uuid4())


@pytest.mark.parametrize(
    ("command", "range_"),
    [
        (["listpoison", "--limit", "0"], "from 1 to 1000000"),
        (["listpoison", "--limit", "1000001"], "from 1 to 1000000"),
        (["queuestats", "--interval", "0.05"], r"from 0\.1 to 3600"),
        (["queuestats", "--interval", "3601"], r"from 0\.1 to 3600"),
        (["queuestats", "--interval", "nan"], r"from 0\.1 to 3600"),
        (["runqueueworker", "--processes", "0"], "from 1 to 256"),
        (["runqueueworker", "--processes", "257"], "from 1 to 256"),
        (["runqueueworker", "--concurrency", "0"], "from 1 to 256"),
        (["runqueueworker", "--concurrency", "257"], "from 1 to 256"),
    ],
)
def test_a_number_out_of_its_range(command: list[str], range_: str) -> None:
    with pytest.raises(CommandError, match=f"is not accepted: it must be {range_}"):
        call_command(*command)


def test_a_queue_without_consumers_here_is_not_received() -> None:
    with pytest.raises(CommandError, match=r"testapp\.Short has no consumer in this project"):
        call_command("runqueueworker", "testapp.Short")


def test_a_queue_that_is_named_by_label_and_by_table_is_received_once(monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[Any] = []

    class Started(Exception):
        pass

    def start(queues: list[Any], **_: Any) -> None:
        received.extend(queues)
        raise Started

    monkeypatch.setattr(f"{WORKER}.Supervisor", start)
    monkeypatch.setattr(f"{WORKER}.require_shareable_databases", lambda: None)
    monkeypatch.setattr(f"{WORKER}.connections.close_all", lambda: None)  # the transaction of the test
    with pytest.raises(Started):
        call_command("runqueueworker", "flights.FlightDelays", "flight_delays")
    assert [queue._meta.label for queue in received] == ["flights.FlightDelays"]


def test_of_several_queues_none_is_paused_when_one_is_none() -> None:
    with pytest.raises(CommandError):
        call_command("pausequeue", "testapp.Leased", "nope")
    assert not QueueControl.objects.exists()


@pytest.mark.parametrize("arguments", [[], ["--all", "7"], ["--all", "--queue", "testapp.Leased"]])
def test_a_requeue_of_nothing_or_of_two_things_is_refused(arguments: list[str]) -> None:
    bury()
    with pytest.raises(CommandError, match="Select messages by number, --queue, --group or --consumer, or use --all"):
        call_command("requeuepoison", *arguments)
    assert PoisonMessage.objects.count() == 1


@pytest.mark.parametrize("command", ["requeuepoison", "listpoison"])
@pytest.mark.parametrize("option", ["--queue", "--group", "--consumer"])
def test_an_empty_choice_does_not_choose_everything(command: str, option: str) -> None:
    bury()
    with pytest.raises(CommandError, match=f"{option} '' is not accepted"):
        call_command(command, option, "")
    assert PoisonMessage.objects.count() == 1


def test_numbers_that_nothing_has_are_named_and_the_others_are_requeued() -> None:
    number = bury(body=b"{}").number
    archived = bury(status=PoisonMessage.Status.ARCHIVED).number
    out = StringIO()
    with pytest.raises(CommandError, match=f"has the number {archived}, 123456789 "):
        call_command("requeuepoison", "123456789", str(archived), str(number), stdout=out)
    assert out.getvalue() == "1 poison messages were requeued.\n"
    assert Leased.objects.count() == 1


def test_a_dry_run_counts_what_is_unresolved_and_moves_nothing() -> None:
    bury()
    bury(status=PoisonMessage.Status.ARCHIVED)
    out = StringIO()
    call_command("requeuepoison", "--all", "--dry-run", stdout=out)
    assert out.getvalue() == "1 poison messages would be requeued.\n"
    assert PoisonMessage.objects.count() == 2
    assert not Leased.objects.exists()


@pytest.mark.parametrize(("option", "cancels"), [([], 0), (["--keep-counts"], 2)])
def test_counts_are_kept_when_asked(option: list[str], cancels: int) -> None:
    number = bury(cancels=2, body=b"{}").number
    call_command("requeuepoison", str(number), *option, stdout=StringIO())
    assert Leased.objects.get().cancels == cancels


class Terminal(StringIO):
    """The operator presses Ctrl-C when the first batch is done."""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if text.startswith("\r2 "):
            raise KeyboardInterrupt
        return super().write(text)


@pytest.mark.parametrize(
    ("command", "said", "remaining"),
    [
        (["requeuepoison", "--all"], "Stopped; 2 poison messages were requeued, the others are unchanged", (5, 1, 3)),
        (["purgequeue", "testapp.Leased", "--yes"], r"Stopped; 2 messages of testapp\.Leased were deleted", (1, 3, 3)),
        (["movedelayed", "gone.Shop", "testapp.Leased"], r"Stopped; 2 delayed messages go to testapp\.Leased "
                                                         r"now", (3, 3, 1)),
        (["movemessages", "testapp.Leased", "--type", "", "--poison"], "Stopped; 2 messages without a type", (1, 5, 3)),
    ],
)  # fmt: skip
def test_a_long_command_that_is_interrupted_states_how_far_it_came(
    monkeypatch: pytest.MonkeyPatch, command: list[str], said: str, remaining: tuple[int, int, int]
) -> None:
    for place in (
        "failures.poison_operations.BATCH",
        "management.commands.purgequeue.BATCH",
        "operations.move_messages.DELAYED_BATCH",
        "operations.move_messages.BATCH",
    ):
        monkeypatch.setattr(f"queueapp.{place}", 2)
    for _ in range(3):
        bury(body=b"{}")
        Leased.send({}, delay=timedelta(hours=1))
    DelayedMessage.objects.update(destination="gone.Shop")
    Leased.send_many([{}] * 3)

    with pytest.raises(CommandError, match=said) as raised:
        call_command(*command, stdout=StringIO(), stderr=Terminal())

    assert raised.value.returncode == 130
    gone = DelayedMessage.objects.filter(destination="gone.Shop")
    assert (Leased.objects.count(), PoisonMessage.objects.count(), gone.count()) == remaining


def test_to_purge_expired_messages_does_not_ask() -> None:
    out = StringIO()
    call_command("purgequeue", "testapp.Leased", "--expired", stdout=out)
    assert out.getvalue() == "0 expired messages of testapp.Leased were deleted.\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--backlog", "x"], "it must be N or QUEUE=N"),
        (["--backlog", "testapp.Nowhere=3"], "--backlog: "),
        (["--backlog", "testapp.Leased=3"], "which is not received here"),
        (["--filter", "testapp.Capped=/a ="], "Column "),
        (["--filter", "nothing"], "it must be QUEUE=EXPRESSION"),
        (["--filter", "testapp.Capped=/a = 1", "--until-empty"], "--until-empty cannot be combined"),
    ],
)
def test_what_is_wrong_with_a_subscription_is_reported(arguments: list[str], said: str) -> None:
    with pytest.raises(CommandError, match=re.escape(said)):
        call_command("runqueueworker", "testapp.Capped", *arguments)
