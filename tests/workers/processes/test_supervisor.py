"""The process tree: it starts, replaces what dies, ends on request or when there is nothing left to do.

What becomes of the messages of a process that dies is the business of tests/crash.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest
from django.core.management import CommandError, call_command

from queueapp.models import Now, PoisonMessage, QueueControl, Subscriber
from queueapp.operations.control import stop_workers
from tests.in_process_worker import DEADLINE, eventually
from tests.testapp.messages import Ping
from tests.testapp.models import Addressed, AtMostOnce, Effect, Leased, Transactional, Urgent
from tests.testapp.ordering import Fenced
from tests.workers.trees import Tree, children_of
from workers.processes.supervisor import UNROUTABLE
from workers.processes.until_empty import NOTHING, remaining

Start = Callable[..., Tree]


def test_a_worker_that_dies_is_replaced_and_its_tree_stops_when_an_operator_asks(start_tree: Start) -> None:
    tree = start_tree("testapp.Leased", "testapp.Transactional")
    (worker,) = tree.wait_for_workers()

    os.kill(worker, signal.SIGKILL)
    (second,) = eventually(lambda: [item for item in tree.workers if item != worker])
    for queue in (Leased, Transactional):
        queue.send(Ping(queue.__name__))
    eventually(lambda: Effect.objects.count() == 2)
    row = Subscriber.objects.get(process=second, queue="testapp.Leased")
    assert row.restarts == 1
    last = eventually(lambda: QueueControl.objects.filter(queue="testapp.Leased").exclude(last_death="").first())
    assert f":{worker} (leases released: " in last.last_death

    assert stop_workers(row.supervisor)
    assert not stop_workers(row.supervisor), "it is asked already"
    assert tree.wait() == 0
    assert "was killed by SIGKILL" in tree.output
    assert "An operator has asked this worker's tree to stop." in tree.output
    assert second != worker
    assert not Subscriber.objects.exists(), "the dead process was deregistered by its supervisor, the other by itself"


def test_a_tree_works_until_the_queues_and_their_delayed_messages_are_gone(start_tree: Start) -> None:
    AtMostOnce.send(Ping("now"))
    AtMostOnce.send(Ping("later"), delay=timedelta(seconds=1))
    tree = start_tree("testapp.AtMostOnce", "--until-empty")

    assert tree.wait() == 0
    assert sorted(Effect.objects.values_list("name", flat=True)) == ["later", "now"]


def set_up(child_environment: dict[str, str], directory: Path, name: str, settings: str) -> None:
    """Give the tree settings of its own."""
    (directory / f"{name}.py").write_text(settings)
    child_environment["DJANGO_SETTINGS_MODULE"] = name
    child_environment["PYTHONPATH"] = os.pathsep.join([str(directory), child_environment.get("PYTHONPATH", "")])


SHORT_GRACE = """
from tests.settings import *

QUEUEAPP = {**QUEUEAPP, "SHUTDOWN_GRACE": 1}
"""


@pytest.mark.parametrize("is_left", [False, True], ids=["nothing is left", "something is left"])
def test_a_tree_that_works_until_empty_waits_for_handlers_whose_messages_are_in_no_table(
    start_tree: Start, child_environment: dict[str, str], tmp_path: Path, is_left: bool
) -> None:
    """It ended when the table was empty, and what took longer than ``SHUTDOWN_GRACE`` was interrupted though no
    operator had asked."""
    set_up(child_environment, tmp_path, "short_grace", SHORT_GRACE)
    AtMostOnce.send(Ping("slow", sleep_ms=8000 if is_left else 4000))
    if is_left:
        AtMostOnce.send(Strange())
    tree = start_tree("testapp.AtMostOnce", "--until-empty")

    assert tree.wait() == (UNROUTABLE if is_left else 0), tree.output
    assert [*Effect.objects.values_list("name", flat=True)] == ["slow"]
    assert not PoisonMessage.objects.exists()


def test_a_tree_that_works_until_empty_waits_for_the_handlers_of_barriers(
    start_tree: Start, child_environment: dict[str, str], tmp_path: Path
) -> None:
    set_up(child_environment, tmp_path, "short_grace", SHORT_GRACE)
    Fenced.send(Ping("barrier", sleep_ms=4000), is_barrier=True)
    tree = start_tree("testapp.Fenced", "--until-empty")

    assert tree.wait() == 0, tree.output
    assert [*Effect.objects.values_list("name", flat=True)] == ["barrier"]
    assert not PoisonMessage.objects.exists()


class Strange(msgspec.Struct):
    """It has no consumer."""


def test_a_tree_ends_with_a_status_of_its_own_when_unroutable_messages_are_left(start_tree: Start) -> None:
    for queue in (Leased, Addressed):
        queue.send(Ping(queue.__name__))
        queue.send(Strange())
    Addressed.send(Ping("renamed"), recipient="renamed", unknown_recipient=True)
    tree = start_tree("testapp.Leased", "testapp.Addressed", "--until-empty")

    assert tree.wait() == UNROUTABLE == 3
    assert Leased.objects.count() == 1
    kind = f"{__name__}.Strange"
    assert "The remaining messages have no consumer here: " in tree.output
    assert f"1 for type '{kind}', no consumer in this project" in tree.output
    assert "1 for recipient 'renamed', no consumer in this project" in tree.output


def test_a_tree_that_works_until_empty_states_what_it_waits_for(start_tree: Start) -> None:
    AtMostOnce.send(Ping("later"), delay=timedelta(hours=3))
    AtMostOnce.send(Strange())
    tree = start_tree("testapp.AtMostOnce", "--until-empty")

    eventually(lambda: "Waiting for testapp.AtMostOnce: 1 ready, 1 delayed, the first due in 2h 59m." in tree.output)
    assert tree.process.poll() is None, "the delayed message is to be handled here"
    assert tree.terminate() == 0, tree.output


@pytest.mark.django_db
def test_remaining_messages_and_whether_a_consumer_here_takes_them() -> None:
    assert remaining([Leased, Urgent], runs_maintenance=True) == NOTHING
    Leased.send(Strange())
    assert remaining([Leased], runs_maintenance=True).hopeless
    Urgent.send(Strange(), priority=2)
    rest = remaining([Leased, Urgent], runs_maintenance=True)
    assert rest.hopeless
    assert f"testapp.Urgent: 1 ready, 1 for type '{__name__}.Strange', no consumer in this project" in rest.words
    Leased.send(Ping("known"))
    assert not remaining([Leased, Urgent], runs_maintenance=True).hopeless
    Leased.objects.filter(headers__contains="Ping").update(lease_expires=Now() + timedelta(hours=1))
    assert remaining([Leased], runs_maintenance=True)[:2] == ("testapp.Leased: 1 ready, 1 leased", False)
    Leased.objects.filter(headers__contains="Ping").update(lease_expires=None, expires=Now() - timedelta(hours=1))
    assert remaining([Leased], runs_maintenance=False) == (
        f"testapp.Leased: 1 ready, 1 for type '{__name__}.Strange', no consumer in this project",
        True,
        False,
    ), "an expired message does not count"


@pytest.mark.django_db
def test_a_barrier_that_waits_for_a_worker_has_a_consumer_here() -> None:
    """It cannot be claimed, so no type was found, and a tree whose workers took long to start had ended with 3."""
    Fenced.send(Ping("barrier"), is_barrier=True)
    Fenced.send(Ping("behind"))
    assert remaining([Fenced], runs_maintenance=True) == ("testapp.Fenced: 2 ready", False, False)


@pytest.mark.django_db
def test_remaining_messages_are_found_behind_many_unroutable_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.processes.until_empty.PIECE", 2)
    Leased.send_many([Strange()] * 5)
    assert remaining([Leased], runs_maintenance=True).hopeless
    Leased.send(Ping("known"))
    assert not remaining([Leased], runs_maintenance=True).hopeless


def test_the_children_end_when_their_supervisor_is_killed(start_tree: Start) -> None:
    tree = start_tree("testapp.Leased")
    (worker,) = tree.wait_for_workers()
    children = children_of(tree.process.pid)
    assert worker in children
    assert len(children) == 2, "a worker and a dispatcher"

    tree.process.kill()

    eventually(lambda: not any(os.path.exists(f"/proc/{child}/cmdline") and _runs(child) for child in children))


SLOW = """
import os, pathlib, sys, threading
from tests.settings import *

if "workers.processes.child" in sys.orig_argv:
    pathlib.Path(__file__).with_name(f"{os.getpid()}.begun").touch()
    threading.Event().wait()
"""


def test_children_in_setup_end_at_once_on_a_stop_request(
    start_tree: Start, child_environment: dict[str, str], tmp_path: Path
) -> None:
    """Seen beside four busy loops: one with a stop request during its imports went on with them until it was
    killed, and the tree ended with 1. Here the user's settings never come to an end."""
    set_up(child_environment, tmp_path, "slow", SLOW)
    tree = start_tree("testapp.Leased")
    eventually(lambda: len(list(tmp_path.glob("*.begun"))) == 2, 4 * DEADLINE)

    assert tree.terminate() == 0, tree.output
    assert "did not stop" not in tree.output


def _runs(process: int) -> bool:
    try:
        with open(f"/proc/{process}/cmdline", "rb") as file:
            return b"workers.processes.child" in file.read()
    except OSError:
        return False


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere.Nothing"], "There is no queue 'nowhere.Nothing'"),
        (["testapp.Readable"], "testapp.Readable has no consumer"),
        (["--processes", "0"], "--processes 0 is not accepted: it must be from 1 to 256"),
        (["--concurrency", "1000"], "--concurrency 1000 is not accepted: it must be from 1 to 256"),
    ],
)
def test_a_tree_that_cannot_work_gives_the_reason(arguments: list[str], said: str, transactional_db: None) -> None:
    with pytest.raises(CommandError, match=said):
        call_command("runqueueworker", *arguments)
