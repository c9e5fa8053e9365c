"""Recording a failed attempt cannot fail, whatever a message brings along and the tables refuse."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
from django.db import connection

from queueapp.failures import poison_operations
from queueapp.failures.apply_verdict import fail_taken
from queueapp.failures.recoverability import Poison, RetryLater, RetryNow
from queueapp.models import PoisonMessage
from queueapp.sql import queue_sql
from queueapp.sql.claims import SeqRange
from queueapp.sql.message_columns import Row
from tests.in_process_worker import real_commits
from tests.testapp.models import AddressedUrgent, AtMostOnce, Leased, Transactional

from .failing import BODY, EVERY, IN_ITS_TABLE, Failed, Message, consumer, deciding

pytestmark = [
    real_commits,
    pytest.mark.skipif(connection.vendor != "postgresql", reason="what the tables refuse is written for PostgreSQL"),
]


# -- what a message brings along ------------------------------------------------------------------------------------


@EVERY
@pytest.mark.parametrize(
    "headers", [r'{"type":"a\u0000b"}', r'{"NServiceBus.EnclosedMessageTypes":"\u0000"}', "{", "", "[[[" * 9999]
)
def test_headers_of_any_kind_are_kept_as_they_are(message: Message, headers: str) -> None:
    message.put(headers)

    message.fail(deciding(Poison("tests")))

    row = message.kept()
    assert (row.headers, row.reason) == (headers, "tests")
    assert "\0" not in row.message_type


@pytest.mark.parametrize("failures", ["{", "7", "[7]", '[{"at":7}]', '[{"at":"0001-01-01T00:00:00+14:00"}]', '[{"attempt":"x"}]',  # noqa: E501
                                      '[{"attempt":99999999999999999999}]', "[" * 9999])  # fmt: skip
@EVERY
def test_a_history_of_any_kind_is_no_obstacle(message: Message, failures: str) -> None:
    message.put(failures=failures)

    message.fail(deciding(Poison("tests")))

    assert message.kept().reason.startswith(("tests", "Failed: bad [kept without details: "))


@EVERY
@pytest.mark.parametrize("when", ["infinity", "-infinity", "20000-01-01", "4000-01-01 BC"])
@pytest.mark.parametrize("column", ["expires", "enqueued_at"])
def test_a_time_that_python_has_no_word_for_is_no_obstacle(message: Message, when: str, column: str) -> None:
    if column == "expires" and when in ("-infinity", "4000-01-01 BC") and message.queue is not Transactional:
        pytest.skip("over, so no worker receives it")
    message.put()
    with connection.cursor() as cursor:
        cursor.execute(f'UPDATE "{message.queue._meta.db_table}" SET {column} = %s', [when])

    message.fail(deciding(Poison("tests")))

    row = message.kept()
    assert row.reason == "tests"
    if column == "expires" and when in ("infinity", "20000-01-01"):
        assert row.expires is None, "never"
    if column == "enqueued_at":
        assert row.enqueued_at is not None


@pytest.mark.parametrize("whole", [False, True])
def test_a_message_that_never_expires_is_claimed_beside_others(whole: bool) -> None:
    AddressedUrgent.send({})
    AddressedUrgent.send({}, recipient="")
    with connection.cursor() as cursor:
        cursor.execute(f"UPDATE \"{AddressedUrgent._meta.db_table}\" SET expires = 'infinity'")

    rows = queue_sql(AddressedUrgent, connection).claims.claim_by_delete(
        connection, [SeqRange(recipient=name) for name in ("", "first")], 10, whole=whole
    )

    sql = queue_sql(AddressedUrgent, connection)
    assert {sql.table.row_of(row).expires for row in rows} == {None}


@IN_ITS_TABLE
def test_counts_that_no_column_takes_are_no_obstacle(message: Message) -> None:
    message.put(deliveries=2**31 - 1 - (message.queue is Leased))

    message.fail(consumer(attempts=9, retry_delay=0))

    row = message.kept() if message.queue is Transactional else None
    if row is not None:
        assert row.deliveries == 2**31 - 1
        assert "integer out of range" in row.reason


@pytest.mark.parametrize("headers", ["\0", "\ud800", '{"a":"\0ß"}'])
def test_headers_that_no_column_takes_are_escaped(headers: str) -> None:
    row = Row(1, uuid.uuid4(), headers, BODY, recipient="me\0", correlation_id="\ud800" * 300, priority=2)

    fail_taken(AtMostOnce, "default", row, Failed("bad"), consumer=deciding(Poison("tests")))

    kept = PoisonMessage.objects.get()
    assert kept.headers == headers.encode("ascii", "backslashreplace").decode().replace("\0", "\\u0000")
    assert (kept.body, kept.recipient, kept.priority) == (BODY, "me\ufffd", 2)
    assert kept.reason.startswith("tests [kept without details: ")


# -- what the tables refuse -----------------------------------------------------------------------------------------


@contextmanager
def refusing(table: str, condition: str) -> Iterator[None]:
    """A CHECK constraint of the project on a table."""
    with connection.cursor() as cursor:
        cursor.execute(f'ALTER TABLE "{table}" ADD CONSTRAINT refused CHECK ({condition}) NOT VALID')
    try:
        yield
    finally:
        with connection.cursor() as cursor:
            cursor.execute(f'ALTER TABLE "{table}" DROP CONSTRAINT refused')


@IN_ITS_TABLE
def test_a_queue_that_refuses_the_counts_has_its_message_in_poison(message: Message) -> None:
    message.put()
    with refusing(message.queue._meta.db_table, "failures IS NULL"):
        message.fail(deciding(RetryNow()))

    row = message.kept()
    assert row.reason.startswith("Failed: bad [kept without details: IntegrityError: ")
    assert "refused" in row.reason
    assert (row.attempts, row.deliveries, row.headers) == (1, 1, '{"k":"v"}')


@IN_ITS_TABLE
def test_a_delayed_store_that_refuses_a_message_has_it_in_poison(message: Message) -> None:
    message.put()
    with refusing("queueapp_delayedmessage", "deliveries = 0"):
        verdict = message.fail(deciding(RetryLater(timedelta(1))))

    assert isinstance(verdict, Poison)
    assert "refused" in message.kept().reason


@EVERY
def test_a_record_that_is_refused_is_made_shorter(message: Message) -> None:
    message.put()
    with refusing("queueapp_poisonmessage", "traceback = ''"):
        message.fail(deciding(Poison("because")))

    row = message.kept()
    assert row.reason.startswith("because [kept without details: IntegrityError: ")
    assert (row.attempts, row.headers) == (1, '{"k":"v"}')


@EVERY
def test_a_column_that_is_too_short_is_no_obstacle(message: Message) -> None:
    message.put()
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE queueapp_poisonmessage ALTER exception_message TYPE varchar(5)")
    try:
        message.fail(deciding(Poison("because")), Failed("longer than that"))
    finally:
        with connection.cursor() as cursor:
            cursor.execute("ALTER TABLE queueapp_poisonmessage ALTER exception_message TYPE text")

    assert "DataError" in message.kept().reason


@EVERY
def test_a_bare_record_can_be_requeued(message: Message) -> None:
    message.put(priority=0, correlation_id="c")
    with refusing("queueapp_poisonmessage", "traceback = ''"):
        message.fail(deciding(Poison("because")))

    assert poison_operations.requeue(PoisonMessage.objects.all()) == 1

    row = message.queue.objects.get()
    assert (row.body, row.headers, row.correlation_id) == (BODY, '{"k":"v"}', "c")


@EVERY
def test_a_poison_table_that_refuses_rows_is_reported_and_the_message_stays(message: Message) -> None:
    if message.queue is AtMostOnce:
        pytest.skip("it is nowhere by then")
    message.put()
    with refusing("queueapp_poisonmessage", "false"), pytest.raises(Exception, match="refused"):
        message.fail(deciding(Poison("because")))

    assert message.queue.objects.count() == 1
    assert not PoisonMessage.objects.exists()
