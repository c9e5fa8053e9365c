"""What a requeue does to expiries and counts, and that it touches nothing but what it moves, where it is written."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import pytest
from django.db import connection, connections, router, transaction

from queueapp.failures import poison_operations
from queueapp.models import Now, PoisonMessage
from tests.in_process_worker import real_commits
from tests.queueapp.failures.test_poison import HOUR, bury
from tests.testapp.models import Leased, Transactional, Urgent

pytestmark = real_commits
Status = PoisonMessage.Status
LATER = datetime(2090, 1, 1, tzinfo=UTC)


def test_an_expiry_that_is_still_to_come_is_kept_and_one_that_is_over_is_dropped() -> None:
    bury(1, expires=LATER)
    bury(1, expires=Now() - HOUR)
    bury(1)

    assert poison_operations.requeue(poison_operations.find()) == 3

    assert list(Leased.objects.order_by("seq").values_list("expires", flat=True)) == [LATER, None, None]


@contextmanager
def other_session(act: Any) -> Iterator[None]:
    """Another session has done this and commits when the block is left."""
    done, go_on = threading.Event(), threading.Event()

    def run() -> None:
        with transaction.atomic():
            act()
            done.set()
            go_on.wait(30)
        connections.close_all()

    thread = threading.Thread(target=run)
    thread.start()
    assert done.wait(30)
    try:
        yield
    finally:
        go_on.set()
        thread.join(30)


@pytest.mark.skipif(connection.vendor != "postgresql", reason="lock_timeout is PostgreSQL's")
@pytest.mark.parametrize("reset", [True, False])
def test_a_message_that_another_session_archives_meanwhile_is_left_as_it_is(reset: bool) -> None:
    over = datetime(2020, 1, 1, tzinfo=UTC)
    archived, moved = bury(2, expires=over, attempts=3)
    before = PoisonMessage.objects.get(pk=archived.pk)

    with (
        other_session(lambda: poison_operations.archive(poison_operations.find([archived.number]))),
        transaction.atomic(),
        connection.cursor() as cursor,
    ):
        cursor.execute("SET LOCAL lock_timeout = '3s'")
        assert poison_operations.requeue(poison_operations.find(), reset_counts=reset) == 1

    after = PoisonMessage.objects.get()
    assert after.status == Status.ARCHIVED
    assert Leased.objects.get().id == moved.message_id
    for name in ("expires", "deliveries", "cancels", "failures", "attempts"):
        assert getattr(after, name) == getattr(before, name), name


@pytest.mark.parametrize("reset", [True, False])
def test_a_message_archived_before_the_lock_is_taken_is_left_as_it_is(reset: bool) -> None:
    """Between the look for what there is and the lock, and it is committed by then."""
    archived, moved = bury(2, attempts=3)
    done: list[bool] = []

    def archive_first(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        # On SQL Server the lock is a hint, and on every database this is the first statement that locks anything.
        if ("FOR UPDATE" in sql or "UPDLOCK" in sql) and not done:
            done.append(True)
            with other_session(lambda: poison_operations.archive(poison_operations.find([archived.number]))):
                pass
        return execute(sql, params, many, context)

    with connection.execute_wrapper(archive_first):
        assert poison_operations.requeue(poison_operations.find(), reset_counts=reset) == 1

    assert done
    assert PoisonMessage.objects.get().status == Status.ARCHIVED
    assert Leased.objects.get().id == moved.message_id


def test_a_queue_with_a_limit_of_deliveries_leaves_one_hand_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Leased.delivery, "max_deliveries", 3)
    bury(attempts=5, deliveries=9, cancels=2)

    poison_operations.requeue(poison_operations.find(), reset_counts=False)

    assert Leased.objects.get().deliveries == 2


def test_what_came_from_a_queue_that_is_no_more_may_go_elsewhere_with_its_counts() -> None:
    """Its limits are nowhere any more: those of the project are taken."""
    (kept,) = bury(attempts=9)
    PoisonMessage.objects.update(queue="gone.Queue")

    assert poison_operations.requeue(poison_operations.find(), to=Leased, reset_counts=False) == 1

    assert Leased.objects.get().id == kept.message_id


class Replicated:
    """A router that reads from a replica; here there is none, so who writes to it finds nothing."""

    def db_for_read(self, model: Any, **hints: Any) -> str:
        return "replica"

    def db_for_write(self, model: Any, **hints: Any) -> str:
        return "default"

    def allow_relation(self, *args: Any, **hints: Any) -> bool:
        return True


@pytest.fixture
def replica(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(router, "routers", [Replicated()])
    return monkeypatch


@pytest.mark.parametrize("reset", [True, False])
def test_poison_is_requeued_where_it_is_written(replica: pytest.MonkeyPatch, reset: bool) -> None:
    PoisonMessage.objects.using("default").bulk_create(
        [PoisonMessage(queue="testapp.Transactional", message_id="0" * 32, reason="tests")]
    )

    assert poison_operations.requeue(PoisonMessage.objects.all(), reset_counts=reset) == 1

    replica.undo()
    assert Transactional.objects.count() == 1


def test_a_message_that_goes_into_a_queue_with_fewer_levels_gets_the_nearest() -> None:
    for priority in (7, 2, -1):
        bury(1, priority=priority)

    assert poison_operations.requeue(poison_operations.find(), to=Urgent) == 3

    assert list(Urgent.objects.order_by("seq").values_list("priority", flat=True)) == [2, 2, 0]


def test_of_several_operators_at_once_each_message_goes_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("queueapp.failures.poison_operations.BATCH", 3)
    bury(60)
    start = threading.Barrier(4)
    done: list[int] = []

    def press(act: Any) -> None:
        start.wait(30)
        try:
            done.append(act())
        finally:
            connections.close_all()

    acts = [
        lambda: poison_operations.requeue(poison_operations.find()),
        lambda: poison_operations.requeue(poison_operations.find(), reset_counts=False),
        lambda: poison_operations.requeue(poison_operations.find(), to=Urgent),
        lambda: poison_operations.archive(
            poison_operations.find(list(PoisonMessage.objects.values_list("number", flat=True)[20:30]))
        ),
    ]
    threads = [threading.Thread(target=press, args=(act,)) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert len(done) == len(acts), "each of them ended well"
    archived = PoisonMessage.objects.filter(status=Status.ARCHIVED).count()
    ids = [*Leased.objects.values_list("id", flat=True), *Urgent.objects.values_list("id", flat=True)]
    assert len(set(ids)) == len(ids) == 60 - archived
    assert sum(done) == 60
    assert not PoisonMessage.objects.filter(status=Status.UNRESOLVED).exists()
