"""What can be done with poison messages, and that none is in two places or in none meanwhile."""

from __future__ import annotations

import threading
import uuid
from datetime import timedelta
from typing import Any

import pytest
from django.db import connections, transaction

from queueapp import Context, QueueNotFound, consumer
from queueapp.consuming.registry import registered
from queueapp.failures import edit_poison, poison_archive, requeue_poison
from queueapp.failures.history import attempts_of, read_failures
from queueapp.models import Now, PoisonMessage
from tests.databases import statements_of
from tests.in_process_worker import real_commits
from tests.testapp.models import Leased, Transactional

pytestmark = real_commits
HOUR = timedelta(hours=1)


def bury(count: int = 1, queue: Any = Leased, **columns: Any) -> list[PoisonMessage]:
    return [
        PoisonMessage.objects.create(
            **{
                "queue": queue._meta.label,
                "message_id": uuid.uuid4(),
                "headers": '{"k":"v"}',
                "body": b"%d" % number,
                "reason": "tests",
                "deliveries": 5,
                "cancels": 2,
                "failures": "[]",
            }
            | columns
        )
        for number in range(count)
    ]


# -- requeue -------------------------------------------------------------------------------------------------------


def test_a_requeued_message_is_back_in_its_queue_as_it_was_and_new() -> None:
    (buried,) = bury(correlation_id="c", reply_to_address="r")

    assert requeue_poison.requeue(poison_archive.find()) == 1

    row = Leased.objects.get()
    assert (row.id, row.headers, row.body) == (buried.message_id, '{"k":"v"}', b"0")
    assert (row.correlation_id, row.reply_to_address) == ("c", "r")
    assert (row.deliveries, row.cancels, row.failures, row.lease_token) == (0, 0, None, None)
    assert not PoisonMessage.objects.exists()


def test_many_are_requeued_in_batches_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requeue_poison, "BATCH", 4)
    bury(10)
    told: list[int] = []

    assert requeue_poison.requeue(poison_archive.find(), progress=told.append) == 10

    assert told == [4, 8, 10]
    assert [row.body for row in Leased.objects.order_by("seq")] == [b"%d" % number for number in range(10)]


def test_what_fails_again_at_once_is_not_requeued_once_more() -> None:
    bury(2)

    assert requeue_poison.requeue(poison_archive.find(), progress=lambda done: bury() and None) == 2

    assert PoisonMessage.objects.count() == 1


def test_each_goes_to_the_queue_it_came_from_or_was_meant_for() -> None:
    bury(2, Leased)
    bury(3, Transactional)
    bury(1, Leased, destination="testapp.Transactional")

    assert requeue_poison.requeue(poison_archive.find()) == 6

    assert (Leased.objects.count(), Transactional.objects.count()) == (2, 4)


def test_they_may_be_sent_elsewhere() -> None:
    bury(2, Leased)

    assert requeue_poison.requeue(poison_archive.find(), to=Transactional) == 2

    assert Transactional.objects.count() == 2


def test_only_what_was_asked_for_goes() -> None:
    first, second, third = bury(3)
    PoisonMessage.objects.filter(pk=third.pk).update(group_key="g")

    assert requeue_poison.requeue(poison_archive.find([first.number])) == 1
    assert requeue_poison.requeue(poison_archive.find(group_key="g")) == 1

    assert PoisonMessage.objects.get().pk == second.pk


def test_a_message_whose_time_was_over_is_handled_when_it_is_requeued() -> None:
    bury(expires=Now() - HOUR)

    requeue_poison.requeue(poison_archive.find())

    assert Leased.objects.get().expires is None
    with Leased.receive() as batch:
        assert len(list(batch)) == 1


def test_a_queue_that_is_no_more_is_named_and_its_messages_stay() -> None:
    bury(queue=Leased)
    bury(1)
    PoisonMessage.objects.filter(pk=PoisonMessage.objects.earliest("number").pk).update(queue="gone.Queue")

    with pytest.raises(QueueNotFound, match=r"gone\.Queue"):
        requeue_poison.requeue(poison_archive.find())

    assert PoisonMessage.objects.count() == 2
    assert not Leased.objects.exists()


def test_counts_may_be_kept_and_leave_one_attempt(monkeypatch: pytest.MonkeyPatch, settings: Any) -> None:
    settings.QUEUEAPP = {"ATTEMPTS": 3}
    monkeypatch.setattr(registered, "_by_queue", {})

    def handle(message: Any, context: Context) -> None: ...

    consumer(Leased, name="four", attempts=4)(handle)
    bury(consumer="four", attempts=7)
    bury(consumer="unknown", attempts=7)
    bury(consumer="four", attempts=1)
    bury(consumer="unknown", attempts=0)

    requeue_poison.requeue(poison_archive.find(), reset_counts=False)

    rows = list(Leased.objects.order_by("seq"))
    assert [attempts_of(row.failures) for row in rows] == [3, 2, 0, 0]
    assert [(row.deliveries, row.cancels) for row in rows] == [(5, 2), (4, 2), (2, 2), (2, 2)], "none of them unended"
    assert read_failures(rows[0].failures)[-1]["verdict"] == "Requeued"


def test_of_two_who_requeue_together_one_moves_a_message() -> None:
    bury(20)
    start = threading.Barrier(2)
    moved: list[int] = []

    def run() -> None:
        start.wait(30)
        moved.append(requeue_poison.requeue(poison_archive.find()))
        connections.close_all()

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)

    assert sum(moved) == 20
    assert Leased.objects.count() == 20


def test_what_goes_wrong_in_the_middle_moves_nothing_of_that_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    bury(2)
    monkeypatch.setattr(statements_of(connections["default"], "inserts"), "insert_from", lambda *given, **options: 1)

    with pytest.raises(RuntimeError, match=r"copied 1 messages into testapp\.Leased but removed 2"):
        requeue_poison.requeue(poison_archive.find())

    assert PoisonMessage.objects.count() == 2


def test_requeueing_may_be_part_of_the_callers_transaction() -> None:
    bury(2)

    with transaction.atomic():
        assert requeue_poison.requeue(poison_archive.find()) == 2
        transaction.set_rollback(True)

    assert PoisonMessage.objects.count() == 2
    assert not Leased.objects.exists()


# -- archive, restore, drop ----------------------------------------------------------------------------------------


def test_an_archived_message_is_neither_found_nor_requeued_until_it_is_restored() -> None:
    bury(2)

    assert poison_archive.archive(poison_archive.find()) == 2
    assert poison_archive.archive(poison_archive.find()) == 0
    assert requeue_poison.requeue(PoisonMessage.objects.all()) == 0

    assert poison_archive.restore(PoisonMessage.objects.all()) == 2
    assert list(PoisonMessage.objects.values_list("archived_at", flat=True)) == [None, None]
    assert requeue_poison.requeue(poison_archive.find()) == 2


def test_only_archived_and_edited_messages_whose_retention_is_over_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poison_archive, "BATCH", 2)
    *old, new, unresolved = bury(5)
    poison_archive.archive(poison_archive.find([row.number for row in (*old[:2], new)]))
    edit_poison.edit_and_requeue(old[2].number, body=b"9")
    PoisonMessage.objects.filter(pk__in=[row.pk for row in old]).update(archived_at=Now() - 2 * HOUR)
    PoisonMessage.objects.filter(pk=unresolved.pk).update(failed_at=Now() - 100 * HOUR)

    assert [poison_archive.drop_old(HOUR), poison_archive.drop_old(HOUR), poison_archive.drop_old(HOUR)] == [2, 1, 0]

    assert set(PoisonMessage.objects.values_list("pk", flat=True)) == {new.pk, unresolved.pk}
