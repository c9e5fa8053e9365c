"""Unroutable messages are moved by type: to another queue whole, or to poison; messages in flight are left
alone."""

from __future__ import annotations

import json
import threading
import uuid
from datetime import timedelta
from io import StringIO
from typing import Any

import msgspec
import pytest
from django.core.management import CommandError, call_command
from django.db import connection, connections, transaction

from queueapp.errors import InvalidOption, TableNotFound
from queueapp.failures import poison_operations
from queueapp.models import Now, PoisonMessage, Subscriber
from queueapp.operations import move_messages
from queueapp.operations.statistics import queue_stats
from queueapp.signals import poisoned
from tests.in_process_worker import real_commits
from tests.testapp.models import Addressed, Leased, Transactional, Urgent

pytestmark = real_commits


class Strange(msgspec.Struct):
    number: int = 0


STRANGE = f"{__name__}.Strange"
KEPT = ("id", "headers", "body", "correlation_id", "reply_to_address", "expires", "enqueued_at", "priority")


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(move_messages, "PAGE", 3)
    monkeypatch.setattr(move_messages, "BATCH", 2)


def strange(queue: Any, count: int, **options: Any) -> list[uuid.UUID]:
    """Among others, so that none of the reads has nothing but them."""
    found = []
    for number in range(count):
        queue.send({"another": number})
        found.append(queue.send(Strange(number), **options))
    return found


def command(*arguments: str) -> str:
    out = StringIO()
    call_command("movemessages", *arguments, stdout=out)
    return out.getvalue()


def test_messages_of_a_type_go_to_another_queue_whole_and_in_their_order() -> None:
    sent = strange(Urgent, 7, priority=2, correlation_id="c", reply_to="r", expires_in=timedelta(hours=1))
    Urgent.objects.filter(id__in=sent).update(deliveries=3, cancels=2, failures='[{"attempt": 1}]')
    before = list(Urgent.objects.filter(id__in=sent).order_by("seq").values(*KEPT))

    assert command("testapp.Urgent", "--type", STRANGE, "--to", "testapp_leased") == (
        f"7 messages of type '{STRANGE}' of testapp.Urgent went to testapp.Leased.\n"
    )

    moved = Leased.objects.order_by("seq")
    assert list(moved.values(*KEPT)) == before
    assert set(moved.values_list("deliveries", "cancels", "failures")) == {(0, 0, None)}
    assert Urgent.objects.count() == 7
    assert not Urgent.objects.filter(id__in=sent).exists()


def test_they_are_no_longer_reported_and_are_received_at_their_destination() -> None:
    Subscriber.objects.create(
        queue="testapp.Leased", host="h", process=1, supervisor=uuid.uuid4(), alive_until=Now() + timedelta(hours=1),
        consumers=json.dumps([["tests.known", "tests.Known"]]), unknown_types=json.dumps([STRANGE]),
    )  # fmt: skip
    strange(Leased, 2)
    assert [item.name for item in queue_stats([Leased])[0].unroutable] == [STRANGE]

    command("testapp.Leased", "--type", queue_stats([Leased])[0].unroutable[0].name, "--to", "testapp.Transactional")

    assert queue_stats([Leased])[0].unroutable == []
    with Transactional.receive(max_backlog=10) as batch:
        received = []
        for message in batch:
            received.append(message.body)
            message.ack()
    assert len(received) == 2


def test_messages_without_a_type_are_named_by_nothing() -> None:
    strange(Leased, 2)

    assert command("testapp.Leased", "--type", "", "--to", "testapp.Transactional") == (
        "2 messages without a type of testapp.Leased went to testapp.Transactional.\n"
    )

    assert {json.loads(message.headers)["type"] for message in Leased.objects.all()} == {STRANGE}


def test_they_become_poison_with_a_reason_and_can_come_back() -> None:
    sent = strange(Leased, 3)
    uuids: list[uuid.UUID] = []

    def receiver(failure: Any, **_: Any) -> None:
        uuids.append(failure.row.id)

    poisoned.connect(receiver)
    try:
        said = command("testapp.Leased", "--type", STRANGE, "--poison")
    finally:
        poisoned.disconnect(receiver)

    assert said == f"3 messages of type '{STRANGE}' of testapp.Leased went to poison.\n"
    assert set(PoisonMessage.objects.values_list("queue", "message_type", "reason")) == {
        ("testapp.Leased", STRANGE, f"moved by an operator: no consumer for {STRANGE}")
    }
    assert uuids == sent
    assert poison_operations.requeue(PoisonMessage.objects.all()) == 3
    assert Leased.objects.filter(id__in=sent).count() == 3


@pytest.mark.parametrize("where", [["--to", "testapp.Transactional"], ["--poison"]])
def test_messages_in_progress_stay_and_are_reported(where: list[str]) -> None:
    sent = strange(Leased, 4)
    Leased.objects.filter(id=sent[0]).update(lease_token=uuid.uuid4(), lease_expires=Now() + timedelta(hours=1))
    Leased.objects.filter(id=sent[1]).update(lease_token=uuid.uuid4(), lease_expires=Now() - timedelta(hours=1))

    said = command("testapp.Leased", "--type", STRANGE, *where)

    assert said.startswith("3 messages of type")
    assert said.endswith("; 1 in flight stay.\n")
    assert list(Leased.objects.filter(headers__contains="Strange").values_list("id", flat=True)) == [sent[0]]


def test_what_is_addressed_to_a_consumer_is_not_among_them() -> None:
    Addressed.send(Strange(), recipient="tests.gone", unknown_recipient=True)
    Addressed.send(Strange())

    command("testapp.Addressed", "--type", STRANGE, "--to", "testapp.Leased")

    assert Leased.objects.count() == 1
    assert Addressed.objects.get().recipient == "tests.gone"


def test_a_dry_run_counts_and_moves_nothing() -> None:
    strange(Leased, 5)

    for where in (["--to", "testapp.Transactional"], ["--poison"]):
        said = command("testapp.Leased", "--type", STRANGE, *where, "--dry-run")
        assert said.startswith(f"5 messages of type '{STRANGE}' of testapp.Leased would go to ")

    assert (Leased.objects.count(), Transactional.objects.count(), PoisonMessage.objects.count()) == (10, 0, 0)


def test_a_batch_that_cannot_be_put_in_is_not_taken_out() -> None:
    strange(Leased, 3)
    with connection.schema_editor() as editor:
        editor.alter_db_table(Transactional, "testapp_transactional", "testapp_elsewhere")
    try:
        with pytest.raises(TableNotFound):
            move_messages.move_type(Leased, STRANGE, Transactional)
    finally:
        with connection.schema_editor() as editor:
            editor.alter_db_table(Transactional, "testapp_elsewhere", "testapp_transactional")

    assert Leased.objects.count() == 6


def test_what_another_transaction_takes_meanwhile_is_not_waited_for_and_not_moved() -> None:
    sent = strange(Leased, 3)
    taken, done = threading.Event(), threading.Event()

    def take() -> None:
        with transaction.atomic():
            assert list(Leased.objects.select_for_update().filter(id=sent[0]))
            taken.set()
            done.wait(30)
        connections.close_all()

    thread = threading.Thread(target=take)
    thread.start()
    try:
        assert taken.wait(30)
        assert move_messages.move_type(Leased, STRANGE, Transactional) == 2
    finally:
        done.set()
        thread.join(30)
    assert Leased.objects.filter(id=sent[0]).exists()


def test_of_two_operators_at_once_each_message_goes_with_one() -> None:
    strange(Leased, 20)
    start, moved = threading.Barrier(3), []

    def move() -> None:
        start.wait(30)
        moved.append(move_messages.move_type(Leased, STRANGE, Transactional))
        connections.close_all()

    threads = [threading.Thread(target=move) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert sum(moved) == Transactional.objects.count()
    assert Transactional.objects.count() + Leased.objects.filter(headers__contains="Strange").count() == 20
    assert len(set(Transactional.objects.values_list("id", flat=True))) == Transactional.objects.count()


def test_a_queue_that_is_the_same_or_not_there_is_refused() -> None:
    with pytest.raises(InvalidOption, match="another queue in the database 'default'"):
        move_messages.move_type(Leased, STRANGE, Leased)
    with pytest.raises(CommandError, match="another queue"):
        command("testapp.Leased", "--type", STRANGE, "--to", "testapp.Leased")
    with pytest.raises(CommandError, match="There is no queue 'nope'"):
        command("testapp.Leased", "--type", STRANGE, "--to", "nope")
    with pytest.raises(CommandError, match="one of the arguments --to --poison is required"):
        command("testapp.Leased", "--type", STRANGE)


def test_what_is_sent_meanwhile_waits_for_the_next_time() -> None:
    strange(Leased, 2)
    later: list[uuid.UUID] = []

    assert (
        move_messages.move_type(Leased, STRANGE, Transactional, progress=lambda _: later.extend(strange(Leased, 1)))
        == 2
    )

    assert later
    assert set(Leased.objects.filter(headers__contains="Strange").values_list("id", flat=True)) == set(later)
