"""What an operator does by hand meets what workers do on the same rows."""

import os
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth import get_user_model
from django.db import OperationalError, connection, connections, transaction
from django.test import override_settings
from django.test.utils import CaptureQueriesContext

from queueapp import LeaseLost, Poison
from queueapp.failures import poison_operations
from queueapp.models import Now, PoisonMessage, QueueControl
from queueapp.operations import control
from queueapp.signals import poisoned
from queueapp.sql import queue_sql
from tests.databases import known_as
from tests.in_process_worker import real_commits
from tests.testapp.models import AddressedUrgent, AtMostOnce, Leased, Transactional


@pytest.fixture
def operator(db: None) -> Any:
    return get_user_model().objects.create_user("operator")


@contextmanager
def locked_elsewhere(queue: Any, seq: int) -> Iterator[None]:
    """Hold the row's lock in another session, as a receiver in the middle of its transaction does."""
    second_connection = connection.copy()
    try:
        second_connection.set_autocommit(False)
        assert queue_sql(queue, second_connection).failures.lock(second_connection, seq, None, 10_000) is not None
        yield
        second_connection.rollback()
    finally:
        second_connection.close()


def seqs(queue: Any) -> list[int]:
    return list(queue.objects.order_by("seq").values_list("seq", flat=True))


def lease(queue: Any, *part: int, period: timedelta = timedelta(seconds=30)) -> None:
    queue.objects.filter(seq__in=part).update(
        lease_token=uuid.uuid4(), lease_owner=uuid.uuid4(), lease_expires=Now() + period, deliveries=1
    )


# -- the whole queue -----------------------------------------------------------------------------------------------


def test_pause_is_written_with_its_user_and_logged_once(operator: Any) -> None:
    assert control.pause(Leased, by=operator)
    assert not control.pause(Leased, by=operator)
    row = QueueControl.objects.get(queue="testapp.Leased")
    assert (row.paused, row.changed_by) == (True, operator)
    assert [entry.change_message for entry in LogEntry.objects.filter(object_id="testapp.Leased")] == ["Paused."]


def test_resume_ends_a_pause_and_states_when_there_was_none(operator: Any) -> None:
    control.pause(Leased)
    assert control.resume(Leased, by=operator)
    assert not control.resume(Leased, by=operator)
    assert not QueueControl.objects.get(queue="testapp.Leased").paused
    assert LogEntry.objects.get().change_message == "Resumed."


@pytest.mark.django_db
def test_a_script_pauses_without_leaving_a_log_entry() -> None:
    assert control.pause(Leased)
    assert QueueControl.objects.get().changed_by is None
    assert not LogEntry.objects.exists()


def test_purge_leaves_what_is_leased(operator: Any) -> None:
    Leased.send_many({"n": n} for n in range(10))
    held = seqs(Leased)[3:5]
    lease(Leased, *held)
    assert control.purge(Leased, by=operator) == (8, True)
    assert seqs(Leased) == held
    assert LogEntry.objects.get().change_message == "Purged 8 messages."


@pytest.mark.django_db
@override_settings(QUEUEAPP={"PURGE_BATCH": 2})
def test_purge_stops_after_the_batch_in_which_its_time_is_over() -> None:
    Leased.send_many({"n": n} for n in range(5))
    assert control.purge(Leased, within=timedelta(0)) == (2, False)
    assert control.purge(Leased) == (3, True)


# -- single messages -----------------------------------------------------------------------------------------------


@pytest.mark.django_db
def test_delete_leaves_leased_messages_and_counts_what_went() -> None:
    Leased.send_many({"n": n} for n in range(4))
    first, second, third, fourth = seqs(Leased)
    lease(Leased, second)
    lease(Leased, third, period=timedelta(seconds=-1))
    assert control.delete(Leased, [first, second, third, fourth + 100]) == 2
    assert seqs(Leased) == [second, fourth]


@pytest.mark.django_db
@pytest.mark.parametrize("queue", [Transactional, AtMostOnce, AddressedUrgent])
def test_delete_works_on_every_semantics_and_shape(queue: Any) -> None:
    queue.send({"n": 1}, recipient="a.consumer", unknown_recipient=True) if queue is AddressedUrgent else queue.send(
        {"n": 1}
    )
    assert control.delete(queue, seqs(queue)) == 1
    assert seqs(queue) == []


@pytest.mark.django_db(transaction=True)
def test_what_a_receiver_has_locked_is_skipped_without_waiting() -> None:
    Transactional.send_many({"n": n} for n in range(2))
    first, second = seqs(Transactional)
    with locked_elsewhere(Transactional, first):
        assert control.delete(Transactional, [first, second]) == 1
        assert control.move_to_poison(Transactional, [first], reason="by hand") == 0
    assert seqs(Transactional) == [first]
    assert not PoisonMessage.objects.exists()


@pytest.mark.django_db
def test_released_message_is_received_again_and_its_old_holder_cannot_end_it() -> None:
    Leased.send({"n": 1})
    with Leased.receive() as batch:
        for message in batch:
            assert control.release_leases(Leased, [message.seq]) == 1
            row = Leased.objects.get()
            assert (row.lease_token, row.lease_owner, row.lease_expires, row.deliveries) == (None, None, None, 1)
            with pytest.raises(LeaseLost):
                message.ack()
    with Leased.receive() as batch:
        assert [message.deliveries for message in batch] == [2]


@pytest.mark.django_db
def test_release_counts_only_messages_that_had_a_lease() -> None:
    Leased.send_many({"n": n} for n in range(3))
    lease(Leased, *seqs(Leased)[:2])
    assert control.release_leases(Leased, seqs(Leased)) == 2


@pytest.mark.django_db
def test_move_to_poison_takes_the_message_whole_and_requeue_brings_it_back() -> None:
    identity = AddressedUrgent.send(
        b"\x00\xff",
        headers={"trace": "7"},
        priority=2,
        recipient="me",
        unknown_recipient=True,
        correlation_id="c",
        reply_to="r",
        expires_in=timedelta(hours=1),
    )
    before = AddressedUrgent.objects.get()
    assert control.move_to_poison(AddressedUrgent, [before.seq], reason="x" * 600) == 1
    assert not AddressedUrgent.objects.exists()
    kept = PoisonMessage.objects.get()
    assert (kept.queue, kept.message_id, kept.reason, kept.consumer) == (
        "testapp.AddressedUrgent", identity, "x" * 500, "me",
    )  # fmt: skip
    assert poison_operations.requeue(PoisonMessage.objects.all()) == 1
    after = AddressedUrgent.objects.get()
    same = ("id", "headers", "body", "priority", "recipient", "correlation_id", "reply_to_address")
    assert after.expires == before.expires
    assert [getattr(after, name) for name in same] == [getattr(before, name) for name in same]


@pytest.mark.django_db
def test_move_to_poison_leaves_leased_messages() -> None:
    Leased.send({"n": 1})
    lease(Leased, *seqs(Leased))
    assert control.move_to_poison(Leased, seqs(Leased), reason="by hand") == 0
    assert Leased.objects.count() == 1


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("failures", "first"),
    [
        (None, None),
        ("not json", None),
        ("[1, 2]", None),
        ('[{"at": "yesterday"}]', None),
        ('[{"at": "2026-02-31T00:00:00Z"}]', None),
        ('[{"at": "2026-01-02T03:04:05"}]', datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)),
        ('[{"at": "2026-01-02T03:04:05+00:00"}]', datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)),
    ],
)
def test_move_to_poison_reads_whatever_history_a_row_has(failures: str | None, first: datetime | None) -> None:
    Leased.send({"n": 1})
    Leased.objects.update(failures=failures, headers="{")
    assert control.move_to_poison(Leased, seqs(Leased), reason="by hand") == 1
    kept = PoisonMessage.objects.get()
    assert (kept.first_failed_at, kept.failures, kept.message_type) == (first, failures, "")


@pytest.mark.django_db
def test_move_to_poison_keeps_what_was_counted() -> None:
    Leased.send({"n": 1})
    Leased.objects.update(deliveries=3, cancels=2, failures='[{"attempt": 4}]')
    assert control.move_to_poison(Leased, seqs(Leased), reason="by hand") == 1
    kept = PoisonMessage.objects.get()
    assert (kept.deliveries, kept.cancels, kept.attempts) == (3, 2, 4)


@real_commits
def test_move_to_poison_reports_where_it_was_done_and_sends_the_signal_after_the_commit() -> None:
    Leased.send({"a": 1}, headers={"type": "order"}, correlation_id="c")
    Leased.objects.update(failures='[{"at":"2020-01-02T03:04:05+00:00","attempt":2}]')
    before = Leased.objects.get()
    reported: list[Any] = []

    def receiver(sender: Any, failure: Any, verdict: Any, **_: Any) -> None:
        reported.append((sender, failure, verdict))

    poisoned.connect(receiver)
    try:
        with transaction.atomic():
            assert control.move_to_poison(Leased, [before.seq], reason="by hand") == 1
            assert reported == [], "it may be rolled back"
    finally:
        poisoned.disconnect(receiver)

    moved = PoisonMessage.objects.get()
    assert moved.host == socket.gethostname()
    assert moved.process.startswith(f"{os.getpid()}:")
    assert moved.worker_version
    assert moved.first_failed_at == datetime(2020, 1, 2, 3, 4, 5, tzinfo=UTC)
    ((sender, failure, verdict),) = reported
    assert (sender, failure.queue, failure.attempt, verdict) == (Leased, Leased, 2, Poison("by hand"))
    assert (failure.row.id, failure.row.body, failure.row.correlation_id) == (before.id, b'{"a":1}', "c")
    assert failure.message_type == moved.message_type


@real_commits
def test_move_to_poison_reports_each_message_and_calls_none_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    Leased.send_many([1, 2])
    reported: list[Any] = []

    def receiver(failure: Any, verdict: Any, **_: Any) -> None:
        reported.append((failure.row.body, repr(failure.exception), verdict))

    poisoned.connect(receiver)
    try:
        assert control.move_to_poison(Leased, seqs(Leased), reason="x\0" * 300) == 2
    finally:
        poisoned.disconnect(receiver)

    said = repr(control.MovedByHand("x\0" * 300))
    kept = PoisonMessage.objects.order_by("number").values_list("reason", flat=True)
    assert reported == [(body, said, Poison(reason)) for body, reason in zip((b"1", b"2"), kept, strict=True)]
    assert not caplog.records, "nothing has failed"


@real_commits
def test_move_to_poison_that_is_rolled_back_sends_no_signal() -> None:
    Leased.send({})
    reported: list[Any] = []

    def receiver(**given: Any) -> None:
        reported.append(given)

    poisoned.connect(receiver)
    try:
        with transaction.atomic():
            control.move_to_poison(Leased, seqs(Leased), reason="by hand")
            transaction.set_rollback(True)
    finally:
        poisoned.disconnect(receiver)

    assert reported == []


@pytest.mark.django_db
@pytest.mark.skipif(connection.vendor != "postgresql", reason="SQL Server has no such times")
@pytest.mark.parametrize("at", ["infinity", "20000-01-01 00:00+00"])
def test_a_time_that_the_driver_cannot_read_keeps_no_message_from_poison(at: str) -> None:
    Leased.send_many([1, 2])
    with connection.cursor() as cursor:
        cursor.execute(f'UPDATE "{Leased._meta.db_table}" SET expires = %s::timestamptz WHERE body = %s', [at, b"1"])

    assert control.move_to_poison(Leased, seqs(Leased), reason="by hand") == 2

    assert not Leased._base_manager.exists()
    kept = PoisonMessage.objects.order_by("number").values_list("body", "reason", "expires")
    assert [(bytes(body), reason, expires) for body, reason, expires in kept] == [
        (b"1", "by hand", None),
        (b"2", "by hand", None),
    ]


@pytest.mark.django_db
@pytest.mark.skipif(connection.vendor != "postgresql", reason="SQL Server has no such times")
def test_beside_a_time_that_the_driver_cannot_read_only_what_was_asked_for_and_is_free_is_moved() -> None:
    Leased.send_many([1, 2, 3])
    first, second, third = seqs(Leased)
    lease(Leased, second)
    with connection.cursor() as cursor:
        cursor.execute(f"UPDATE \"{Leased._meta.db_table}\" SET expires = 'infinity' WHERE body = '1'")

    assert control.move_to_poison(Leased, [first, second], reason="by hand") == 1

    assert seqs(Leased) == [second, third]
    assert PoisonMessage.objects.get(body=b"1").reason == "by hand"


@pytest.mark.django_db
@pytest.mark.skipif(connection.vendor != "postgresql", reason="SQL Server has no such times")
def test_a_time_that_the_driver_cannot_read_keeps_no_lease_from_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Leased.delivery, "max_deliveries", 1)
    Leased.send_many([1, 2])
    lease(Leased, *seqs(Leased))
    with connection.cursor() as cursor:
        cursor.execute(f"UPDATE \"{Leased._meta.db_table}\" SET expires = 'infinity' WHERE body = '1'")

    assert control.release_leases(Leased, seqs(Leased)) == 2

    assert not Leased._base_manager.exists()
    assert PoisonMessage.objects.count() == 2


@pytest.mark.django_db
@pytest.mark.skipif(connection.vendor != "postgresql", reason="the constraint is PostgreSQL's")
def test_what_cannot_be_kept_with_its_details_is_kept_bare_and_keeps_no_other_from_poison() -> None:
    Leased.send_many([1, 2])
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE queueapp_poisonmessage ADD CHECK (body <> '1'::bytea OR host IS NULL OR host = '')")

    assert control.move_to_poison(Leased, seqs(Leased), reason="by hand") == 2

    assert not Leased._base_manager.exists()
    first, second = PoisonMessage.objects.order_by("number").values_list("reason", flat=True)
    assert first.startswith("by hand [kept without details")
    assert second == "by hand"


@pytest.mark.django_db
@pytest.mark.skipif(connection.vendor != "postgresql", reason="the constraint is PostgreSQL's")
def test_of_what_is_kept_one_by_one_it_is_known_where_it_came_from_and_how_often_it_was_tried() -> None:
    for number in (1, 2):
        AddressedUrgent.send(number, recipient="me", unknown_recipient=True)
    AddressedUrgent.objects.update(failures='[{"attempt": 2}]')
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE queueapp_poisonmessage ADD CHECK (body <> '1'::bytea OR host IS NULL OR host = '')")

    assert control.move_to_poison(AddressedUrgent, seqs(AddressedUrgent), reason="by hand") == 2

    kept = PoisonMessage.objects.values_list("queue", "consumer", "attempts")
    assert list(kept) == [("testapp.AddressedUrgent", "me", 2)] * 2


@real_commits
@pytest.mark.skipif(connection.vendor != "postgresql", reason="the locks are PostgreSQL's")
def test_an_error_that_will_pass_is_the_callers_and_nothing_is_tried_beyond_it() -> None:
    Leased.send_many([1, 2])
    second_connection = connection.copy()
    try:
        second_connection.set_autocommit(False)
        with second_connection.cursor() as cursor:
            cursor.execute("LOCK TABLE queueapp_poisonmessage IN EXCLUSIVE MODE")
        with CaptureQueriesContext(connection) as done, transaction.atomic():
            connection.cursor().execute("SET LOCAL lock_timeout = '10ms'")
            with pytest.raises(OperationalError), transaction.atomic():
                control.move_to_poison(Leased, seqs(Leased), reason="by hand")
        second_connection.rollback()
    finally:
        second_connection.close()

    assert len([message for message in done if message["sql"].startswith('INSERT INTO "queueapp_poisonmessage"')]) == 1
    assert Leased.objects.count() == 2
    assert not PoisonMessage.objects.exists()


@pytest.fixture(scope="module")
def elsewhere(django_db_setup: None) -> Iterator[str]:
    """The database under another alias: its transactions are others."""
    with known_as("elsewhere") as alias:
        yield alias


@pytest.mark.django_db(**real_commits.kwargs, databases=["default", "elsewhere"])
@pytest.mark.skipif(connection.vendor != "postgresql", reason="the constraint is PostgreSQL's")
def test_in_another_database_all_of_it_is_done_and_undone_there(elsewhere: str) -> None:
    """Whatever is in its way: a time that the driver cannot read, a message that is kept bare."""
    Leased.send_many([1, 2])
    part = seqs(Leased)
    reported: list[Any] = []

    def receiver(**given: Any) -> None:
        reported.append(given)

    poisoned.connect(receiver)
    connection.cursor().execute("SET lock_timeout = '1s'")
    try:
        with transaction.atomic(using=elsewhere):
            with connections[elsewhere].cursor() as cursor:
                cursor.execute(f"UPDATE \"{Leased._meta.db_table}\" SET expires = 'infinity' WHERE body = '1'")
                cursor.execute(
                    "ALTER TABLE queueapp_poisonmessage ADD CHECK (body <> '1'::bytea OR host IS NULL OR host = '')"
                )
            assert control.move_to_poison(Leased, part, reason="by hand", using=elsewhere) == 2
            assert PoisonMessage.objects.using(elsewhere).count() == 2
            transaction.set_rollback(True, using=elsewhere)
    finally:
        poisoned.disconnect(receiver)
        connection.close()

    assert seqs(Leased) == part
    assert not PoisonMessage.objects.exists()
    assert reported == []


@pytest.mark.django_db
def test_what_was_edited_from_another_keeps_that_when_it_is_moved_by_hand() -> None:
    original = uuid.uuid4()
    Leased.send(1, headers={})
    Leased.objects.update(headers=f'{{"edit-of": "{original}"}}')

    assert control.move_to_poison(Leased, seqs(Leased), reason="by hand") == 1

    assert PoisonMessage.objects.get().edit_of == original
