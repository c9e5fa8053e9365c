"""Canaries: batches that grow while messages are handled, and what ends them."""

from __future__ import annotations

import json
import uuid
from datetime import timedelta
from io import StringIO
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connection

from queueapp.errors import QueueError
from queueapp.models import BulkOperation, DelayedMessage, Now, PoisonMessage, PoisonNote, Subscriber
from queueapp.operations import bulk_operations, control, requeue_after_deploy
from queueapp.operations.bulk_operations import FINISHED, RUNNING, STOPPED
from queueapp.operations.requeue_after_deploy import start, start_due
from tests.bulk_rows import fill_up
from tests.testapp.models import Addressed, AtMostOnce, ForeignPostgres, Keyed, Leased

pytestmark = pytest.mark.django_db(transaction=True)
GROUP = "a" * 32


def bury(count: int, **values: Any) -> None:
    defaults = {
        "queue": "testapp.Leased", "reason": "failed", "group_key": GROUP, "headers": "{}", "body": b"{}",
        "worker_version": "1",
    }  # fmt: skip
    fill_up(PoisonMessage(message_id=uuid.uuid4(), **{**defaults, **values}), count)


def deploy(version: str, queue: Any = Leased, *, replaces: bool = True) -> None:
    if replaces:
        Subscriber.objects.all().delete()
    Subscriber.objects.create(
        queue=queue._meta.label, host="h", process=1, supervisor=uuid.uuid4(), version=version,
        alive_until=Now() + timedelta(hours=1),
    )  # fmt: skip


def carry_out(operation: BulkOperation) -> BulkOperation:
    """The next step, without its wait."""
    BulkOperation.objects.update(next_at=Now())
    bulk_operations.carry_out("default")
    operation.refresh_from_db()
    return operation


def handle(queue: Any = Leased, fails: int = 0) -> int:
    """What a worker would do: of the waiting messages the first so many fail, the others are acked; how many."""
    keys = list(queue.objects.order_by("pk").values_list("pk", flat=True))
    if fails:
        control.move_to_poison(queue, keys[:fails], reason="failed again")
    with queue.receive(max_backlog=1000) as batch:
        for message in batch:
            message.ack()
    return len(keys)


@pytest.fixture
def budget_of_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Leased.delivery, "requeue_after_deploy", 2)


def test_batches_grow_while_their_messages_are_handled(budget_of_the_queue: None) -> None:
    bury(130)
    bury(5, group_key="b" * 32)
    deploy("2")
    operation = start(Leased, GROUP)

    sizes = []
    while carry_out(operation).state == RUNNING:
        assert carry_out(operation).state == RUNNING, "nothing more is taken before the last batch has ended"
        sizes.append(handle())

    assert sizes == [1, 2, 5, 20, 100, 2]
    assert (operation.state, operation.changed, operation.failed) == (FINISHED, 130, 0)
    assert PoisonMessage.objects.count() == 5
    note = PoisonNote.objects.get()
    assert note.text == f"Healed by version 2: 130 handled, 0 failed again. (operation {operation.pk})"
    assert (note.group_key, note.queue, note.version) == (GROUP, "testapp.Leased", "2")


def test_a_group_that_still_fails_gets_one_probe_for_each_version(budget_of_the_queue: None) -> None:
    bury(10)
    deploy("1")
    assert start_due("default", [Leased], {}) == 0, "these workers are those that failed"

    for number, version in enumerate(("2", "3"), 1):
        deploy(version)
        examined: dict[str, str] = {}
        assert start_due("default", [Leased], examined) == 1
        operation = carry_out(BulkOperation.objects.latest("number"))
        assert handle(fails=1) == 1
        assert carry_out(operation).state == STOPPED
        assert operation.note == f"Version {version} still fails: the first message is poison again."
        assert [text for _, text in json.loads(operation.errors)] == ["failed again"]

        assert start_due("default", [Leased], examined) == 0
        assert start_due("default", [Leased], {}) == 0, "another process starts none either"
        assert examined == {"testapp.Leased": version}
        assert PoisonNote.objects.count() == number
    assert PoisonMessage.objects.count() == 10
    assert PoisonMessage.objects.filter(reason="failed again").count() == 2, "of 10 messages each version tried one"


def test_it_stops_after_more_failures_than_its_budget() -> None:
    bury(100)
    deploy("2")
    operation = start(Leased, GROUP, budget=1)
    for fails in (0, 1, 0, 6):
        assert carry_out(operation).state == RUNNING
        handle(fails=fails)
    assert carry_out(operation).state == STOPPED
    assert (operation.changed, operation.failed) == (21, 7)
    assert PoisonMessage.objects.count() == 79
    assert PoisonNote.objects.get().text.startswith("Stopped on version 2: 21 handled, 7 failed again.")


def test_a_message_that_is_retried_later_has_not_ended() -> None:
    bury(3)
    deploy("2")
    operation = carry_out(start(Leased, GROUP))
    row = Leased.objects.get()
    Leased.objects.all().delete()
    DelayedMessage.objects.create(message_id=row.id, destination="testapp.Leased", due=Now(), headers="{}")
    assert carry_out(operation).changed == 0
    assert not Leased.objects.exists()

    DelayedMessage.objects.all().delete()
    Leased.objects.create(id=row.id, headers="{}")
    assert carry_out(operation).changed == 0

    handle()
    assert carry_out(operation).changed == 1
    assert Leased.objects.count() == 2


def test_a_copy_for_another_consumer_is_another_message() -> None:
    key = uuid.uuid4()
    for recipient, group in (("a", GROUP), ("b", "b" * 32)):
        PoisonMessage.objects.create(
            message_id=key, recipient=recipient, group_key=group, queue="testapp.Addressed", headers="{}"
        )
    deploy("2", Addressed)
    operation = carry_out(start(Addressed, GROUP))
    Addressed.objects.all().delete()
    PoisonMessage.objects.create(message_id=key, recipient="b", queue="testapp.Addressed", headers="{}")
    assert (carry_out(operation).state, operation.changed, operation.failed) == (FINISHED, 1, 0)


def test_what_becomes_of_a_published_message_in_another_queue_does_not_count() -> None:
    """It has the same id there."""
    for queue in ("testapp.Leased", "testapp.Keyed"):
        bury(1, queue=queue)
    PoisonMessage.objects.update(message_id=uuid.uuid4())
    deploy("2")
    operation = carry_out(start(Leased, GROUP))
    handle()
    key = PoisonMessage.objects.get().message_id
    DelayedMessage.objects.create(message_id=key, destination="testapp.Keyed", due=Now(), headers="{}")
    PoisonMessage.objects.create(message_id=key, queue="testapp.Keyed", group_key=GROUP, headers="{}")

    assert (carry_out(operation).state, operation.changed, operation.failed) == (FINISHED, 1, 0)


def test_workers_of_two_versions_get_no_batch_and_a_newer_version_ends_it(budget_of_the_queue: None) -> None:
    bury(10)
    deploy("2")
    operation = carry_out(start(Leased, GROUP))
    handle()
    deploy("3", replaces=False)
    assert carry_out(operation).state == RUNNING
    assert not Leased.objects.exists()
    assert start_due("default", [Leased], {}) == 0

    deploy("3")
    assert carry_out(operation).state == STOPPED
    assert "version 2 was replaced by 3" in operation.note
    assert start_due("default", [Leased], {}) == 1, "the newer version has its own"


def test_a_message_whose_key_waits_in_the_queue_stays_poison() -> None:
    Keyed.send({"n": 1}, dedupe_key="k")
    waiting = Keyed.objects.get()
    bury(1, queue="testapp.Keyed", headers=waiting.headers)
    deploy("2", Keyed)
    operation = carry_out(start(Keyed, GROUP))
    assert (operation.state, operation.changed, operation.skipped) == (FINISHED, 0, 1)
    assert PoisonMessage.objects.count() == 1
    assert operation.note == "Ended on version 2: 0 handled, 0 failed again, 1 skipped."


def test_a_group_of_which_another_session_locked_a_message_is_not_healed() -> None:
    bury(2)
    deploy("2")
    operation = start(Leased, GROUP)
    other_session = connection.copy()
    other_session.set_autocommit(False)
    try:
        with other_session.cursor() as cursor:
            cursor.execute(
                f"SELECT 1 FROM {PoisonMessage._meta.db_table} WHERE number = %s FOR UPDATE", [operation.last]
            )
        assert carry_out(operation).state == RUNNING
        handle()
        carry_out(operation)
    finally:
        other_session.rollback()
        other_session.close()

    assert (carry_out(operation).state, operation.changed, operation.skipped) == (FINISHED, 1, 1)
    assert operation.note == "Ended on version 2: 1 handled, 0 failed again, 1 skipped."
    assert PoisonMessage.objects.count() == 1


def test_a_failed_step_changes_nothing_and_pauses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    bury(3)
    deploy("2")
    operation = start(Leased, GROUP)

    def broken(*_: Any) -> Any:
        raise ZeroDivisionError

    with monkeypatch.context() as patched:
        patched.setattr(requeue_after_deploy.msgspec.json, "encode", broken)
        assert carry_out(operation).state == bulk_operations.PAUSED
    assert (Leased.objects.count(), PoisonMessage.objects.count()) == (0, 3)
    bulk_operations.resume(operation.pk)
    assert carry_out(operation).state == RUNNING
    assert (Leased.objects.count(), PoisonMessage.objects.count()) == (1, 2)


def test_what_cannot_be_started_is_refused_with_the_cause() -> None:
    with pytest.raises(QueueError, match="no worker is alive"):
        start(Leased, GROUP)
    deploy("2")
    with pytest.raises(QueueError, match="has no unresolved message"):
        start(Leased, GROUP)
    assert not PoisonNote.objects.exists()
    bury(2)
    deploy("3", replaces=False)
    with pytest.raises(QueueError, match="versions 2, 3 are alive"):
        start(Leased, GROUP)
    deploy("3")
    operation = start(Leased, GROUP)
    with pytest.raises(QueueError, match="has had its canary on version 3"):
        start(Leased, GROUP)
    with pytest.raises(QueueError, match="is running"):
        start(Leased, GROUP, again=True)
    bulk_operations.stop(operation.pk)
    assert start(Leased, GROUP, again=True).pk > operation.pk
    with pytest.raises(QueueError, match="AT_MOST_ONCE"):
        start(AtMostOnce, GROUP)
    assert requeue_after_deploy.refused(ForeignPostgres) == "its table is one of another system"


def test_old_notes_are_deleted() -> None:
    PoisonNote.objects.create(group_key=GROUP, text="new")
    PoisonNote.objects.create(group_key=GROUP, text="old", written_at=Now() - requeue_after_deploy.NOTES_KEPT)
    assert requeue_after_deploy.drop_old_notes("default") == 1


def test_the_note_of_a_version_whose_workers_are_alive_stays() -> None:
    bury(1)
    deploy("2")
    start(Leased, GROUP)
    PoisonNote.objects.update(written_at=Now() - requeue_after_deploy.NOTES_KEPT)

    assert requeue_after_deploy.drop_old_notes("default") == 0
    assert requeue_after_deploy.due_groups("default", "testapp.Leased", "2") == []


# -- the command -----------------------------------------------------------------------------------------------------


def run(*arguments: str) -> str:
    out = StringIO()
    call_command("requeueafterdeploy", *arguments, stdout=out)
    return out.getvalue()


def test_the_command_starts_the_canaries_that_are_due() -> None:
    bury(3)
    bury(2, group_key="b" * 32)
    bury(1, group_key="c" * 32, worker_version="2")
    bury(1, group_key="", reason="unreadable")
    deploy("2")

    assert run("--dry-run").splitlines() == [f"testapp.Leased  {GROUP}", f"testapp.Leased  {'b' * 32}"]
    assert run("testapp.Leased", "--group", GROUP, "--budget", "7").endswith("1 canary was started.\n")
    operation = BulkOperation.objects.get()
    assert json.loads(operation.options) == {"version": "2", "budget": 7}
    assert run().endswith("1 canary was started.\n")
    assert run() == "0 canaries were started.\n"

    bulk_operations.stop(operation.pk)
    assert f"{GROUP}  operation" in run("--again", "--group", GROUP)


def test_the_command_finds_one_group_among_any_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requeue_after_deploy, "MAX_GROUPS", 1)
    for letter in "abc":
        bury(1, group_key=letter * 32)
    deploy("2")

    assert run("--dry-run", "--group", "b" * 32) == f"testapp.Leased  {'b' * 32}\n"
    assert run("--again", "--group", "c" * 32).endswith("1 canary was started.\n")


def test_the_command_says_why_a_queue_has_none() -> None:
    bury(3)
    with pytest.raises(CommandError, match="no worker is alive"):
        run()
    with pytest.raises(CommandError, match="--budget -1 is not accepted"):
        run("--budget", "-1")
