"""What can be done with poison messages, and that none is in two places or in none meanwhile."""

from __future__ import annotations

import threading
import uuid
from datetime import timedelta
from typing import Any

import pytest
from django.db import connections, transaction

from queueapp import Context, QueueNotFound, consumer
from queueapp.failures import poison_operations
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

    assert poison_operations.requeue(poison_operations.find()) == 1

    row = Leased.objects.get()
    assert (row.id, row.headers, row.body) == (buried.message_id, '{"k":"v"}', b"0")
    assert (row.correlation_id, row.reply_to_address) == ("c", "r")
    assert (row.deliveries, row.cancels, row.failures, row.lease_token) == (0, 0, None, None)
    assert not PoisonMessage.objects.exists()


def test_many_are_requeued_in_batches_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poison_operations, "BATCH", 4)
    bury(10)
    reported: list[int] = []

    assert poison_operations.requeue(poison_operations.find(), progress=reported.append) == 10

    assert reported == [4, 8, 10]
    assert [row.body for row in Leased.objects.order_by("seq")] == [b"%d" % number for number in range(10)]


def test_what_fails_again_at_once_is_not_requeued_once_more() -> None:
    bury(2)

    assert poison_operations.requeue(poison_operations.find(), progress=lambda done: bury() and None) == 2

    assert PoisonMessage.objects.count() == 1


def test_each_goes_to_the_queue_it_came_from_or_was_meant_for() -> None:
    bury(2, Leased)
    bury(3, Transactional)
    bury(1, Leased, destination="testapp.Transactional")

    assert poison_operations.requeue(poison_operations.find()) == 6

    assert (Leased.objects.count(), Transactional.objects.count()) == (2, 4)


def test_they_may_be_sent_elsewhere() -> None:
    bury(2, Leased)

    assert poison_operations.requeue(poison_operations.find(), to=Transactional) == 2

    assert Transactional.objects.count() == 2


def test_only_what_was_asked_for_goes() -> None:
    first, second, third = bury(3)
    PoisonMessage.objects.filter(pk=third.pk).update(group_key="g")

    assert poison_operations.requeue(poison_operations.find([first.number])) == 1
    assert poison_operations.requeue(poison_operations.find(group_key="g")) == 1

    assert PoisonMessage.objects.get().pk == second.pk


def test_a_message_whose_time_was_over_is_handled_when_it_is_requeued() -> None:
    bury(expires=Now() - HOUR)

    poison_operations.requeue(poison_operations.find())

    assert Leased.objects.get().expires is None
    with Leased.receive() as batch:
        assert len(list(batch)) == 1


def test_a_queue_that_is_no_more_is_named_and_its_messages_stay() -> None:
    bury(queue=Leased)
    bury(1)
    PoisonMessage.objects.filter(pk=PoisonMessage.objects.earliest("number").pk).update(queue="gone.Queue")

    with pytest.raises(QueueNotFound, match=r"gone\.Queue"):
        poison_operations.requeue(poison_operations.find())

    assert PoisonMessage.objects.count() == 2
    assert not Leased.objects.exists()


def test_counts_may_be_kept_and_leave_one_attempt(no_consumers: None, settings: Any) -> None:
    settings.QUEUEAPP = {"ATTEMPTS": 3}

    def handle(message: Any, context: Context) -> None: ...

    consumer(Leased, name="four", attempts=4)(handle)
    bury(consumer="four", attempts=7)
    bury(consumer="unknown", attempts=7)
    bury(consumer="four", attempts=1)
    bury(consumer="unknown", attempts=0)

    poison_operations.requeue(poison_operations.find(), reset_counts=False)

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
        moved.append(poison_operations.requeue(poison_operations.find()))
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
        poison_operations.requeue(poison_operations.find())

    assert PoisonMessage.objects.count() == 2


def test_requeueing_may_be_part_of_the_callers_transaction() -> None:
    bury(2)

    with transaction.atomic():
        assert poison_operations.requeue(poison_operations.find()) == 2
        transaction.set_rollback(True)

    assert PoisonMessage.objects.count() == 2
    assert not Leased.objects.exists()


# -- archive, restore, drop ----------------------------------------------------------------------------------------


def test_an_archived_message_is_neither_found_nor_requeued_until_it_is_restored() -> None:
    bury(2)

    assert poison_operations.archive(poison_operations.find()) == 2
    assert poison_operations.archive(poison_operations.find()) == 0
    assert poison_operations.requeue(PoisonMessage.objects.all()) == 0

    assert poison_operations.restore(PoisonMessage.objects.all()) == 2
    assert list(PoisonMessage.objects.values_list("archived_at", flat=True)) == [None, None]
    assert poison_operations.requeue(poison_operations.find()) == 2


def test_only_archived_and_edited_messages_whose_retention_is_over_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poison_operations, "BATCH", 2)
    *old, new, unresolved = bury(5)
    poison_operations.archive(poison_operations.find([row.number for row in (*old[:2], new)]))
    poison_operations.edit_and_requeue(old[2].number, body=b"9")
    PoisonMessage.objects.filter(pk__in=[row.pk for row in old]).update(archived_at=Now() - 2 * HOUR)
    PoisonMessage.objects.filter(pk=unresolved.pk).update(failed_at=Now() - 100 * HOUR)

    assert [poison_operations.drop_old(HOUR) for _ in range(3)] == [2, 1, 0]

    assert set(PoisonMessage.objects.values_list("pk", flat=True)) == {new.pk, unresolved.pk}
