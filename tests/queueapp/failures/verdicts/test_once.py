"""What is tried again after a commit whose answer was lost is written once."""

from __future__ import annotations

import threading
import uuid
from typing import Any

import pytest
from django.db import connection, connections, transaction

from queueapp import Discard, Poison, signals
from queueapp.failures.apply_verdict import IdempotentTransaction, fail_taken
from queueapp.models import PoisonMessage, ProcessedMessage
from queueapp.sql.message_columns import Row
from tests.in_process_worker import eventually, real_commits
from tests.queueapp.failures.verdicts.failing import deciding
from tests.testapp.models import AtMostOnce


@pytest.fixture
def row() -> Row:
    return Row(1, uuid.uuid4(), "{}", b"whole", deliveries=0)


def keep(row: Row, once: IdempotentTransaction, verdict: Any = None) -> Any:
    decided = deciding(verdict or Poison("tests"))
    return fail_taken(AtMostOnce, "default", row, ValueError("bad"), consumer=decided, once=once)


@pytest.mark.django_db
def test_a_second_try_finds_that_the_first_was_committed_and_reports_it(row: Row) -> None:
    once, reported = IdempotentTransaction(AtMostOnce, "default"), []

    def hear(sender: Any, **kwargs: Any) -> None:
        reported.append(kwargs["verdict"].reason)

    signals.poisoned.connect(hear)
    try:
        first = keep(row, once)
        # Its policy has said something else meanwhile, which is nothing to the row that is there.
        again = keep(row, once, Discard("no more"))
    finally:
        signals.poisoned.disconnect(hear)

    assert first == again == Poison("tests")
    assert [item.reason for item in PoisonMessage.objects.all()] == ["tests"]
    assert reported == ["tests", "tests"], "the process that lost the answer has reported nothing"


@pytest.mark.django_db
def test_another_failure_of_the_same_message_is_another(row: Row) -> None:
    keep(row, IdempotentTransaction(AtMostOnce, "default"))
    keep(row, IdempotentTransaction(AtMostOnce, "default"))

    assert PoisonMessage.objects.count() == 2


@real_commits
@pytest.mark.parametrize("committed", [True, False])
def test_a_commit_that_is_on_its_way_is_waited_for(row: Row, committed: bool) -> None:
    once, written, end = IdempotentTransaction(AtMostOnce, "default"), threading.Event(), threading.Event()

    def first() -> None:
        try:
            with transaction.atomic():
                keep(row, once)
                written.set()
                end.wait(60)
                transaction.set_rollback(not committed)
        finally:
            connections.close_all()

    def second() -> None:
        try:
            keep(row, Copied(once))
        finally:
            connections.close_all()

    threads = [threading.Thread(target=item) for item in (first, second)]
    threads[0].start()
    assert written.wait(60)
    threads[1].start()
    eventually(waits_for_another)
    end.set()
    for thread in threads:
        thread.join(60)

    assert PoisonMessage.objects.count() == 1


class Copied(IdempotentTransaction):
    """The same record in the hands of another try, as it was before the first one."""

    def __init__(self, once: IdempotentTransaction) -> None:
        self.__dict__ |= once.__dict__ | {"decided": None}


def waits_for_another() -> bool:
    if connection.vendor == "microsoft":
        sql = "SELECT COUNT(*) FROM sys.dm_exec_requests WHERE database_id = DB_ID() AND blocking_session_id <> 0"
    else:
        sql = "SELECT count(*) FROM pg_locks WHERE NOT granted AND locktype = 'transactionid'"
    with connection.cursor() as cursor:
        cursor.execute(sql)
        return bool(cursor.fetchone()[0])


@pytest.mark.django_db
def test_without_the_table_of_notes_it_is_kept_all_the_same(row: Row) -> None:
    with connection.schema_editor() as editor:
        editor.alter_db_table(ProcessedMessage, ProcessedMessage._meta.db_table, "out_of_the_way")

    assert keep(row, IdempotentTransaction(AtMostOnce, "default")) == Poison("tests")
    assert [item.reason for item in PoisonMessage.objects.all()] == ["tests"]
