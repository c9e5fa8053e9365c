"""Recording a failed attempt cannot fail: whatever a handler, a policy, a message or a constraint of the table brings along,
the message ends in one place, with its bytes, and with the reason; and nobody else notices."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import Error, connection, connections
from django.db.models import F
from django.db.models.signals import post_save

from queueapp import poison, signals
from queueapp.consuming.registration import Registration
from queueapp.delayed import dispatch_due
from queueapp.models import DelayedMessage, PoisonMessage
from queueapp.poison.burying import is_passing
from queueapp.poison.failures import attempts_of, read_failures
from queueapp.recovery import carrying_out
from queueapp.recovery.carrying_out import fail, fail_taken
from queueapp.recovery.verdicts import Discard, Poison, RetryLater, RetryNow
from queueapp.sql import queue_sql
from queueapp.sql.base import Range, Row
from tests.inprocess import real_commits
from tests.testapp.models import AddressedUrgent, AtMostOnce, ForeignPostgres, Leased, Transactional

pytestmark = [
    real_commits,
    pytest.mark.skipif(connection.vendor != "postgresql", reason="what the tables refuse is written for PostgreSQL"),
]
BODY = b"\0\xff intact"


class Failed(ValueError):
    """What the handler of a test raised."""


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__


class Untouchable(type):
    def __instancecheck__(cls, instance: object) -> bool:
        raise RuntimeError("do not ask")


class Fussy(Exception, metaclass=Untouchable):
    """``isinstance`` raises."""


def consumer(policy: Any = None, **options: Any) -> Registration:
    return Registration(Leased, "tests", Any, lambda message: None, {"policy": policy, "attempts": 3} | options)


def deciding(verdict: Any) -> Registration:
    return consumer(lambda failure: verdict)


@dataclass
class Message:
    """One message whose attempt fails, received in one of three ways."""

    queue: Any

    def put(self, headers: str = '{"k":"v"}', **columns: Any) -> None:
        row = Row(0, uuid.uuid4(), headers, BODY, **columns)
        queue_sql(self.queue, connection).insert_row(connection, row)

    def fail(self, who: Registration | None, error: BaseException | None = None, **options: Any) -> Any:
        sql, token = queue_sql(self.queue, connection), uuid.uuid4()
        error = error or Failed("bad")
        levels = [Range()]
        if self.queue is AtMostOnce:
            (claimed,) = sql.claim_by_delete(connection, levels, 1, whole=True)
            return fail_taken(self.queue, "default", sql.table.row_of(claimed), error, consumer=who, **options)
        if self.queue is Leased:
            (claimed,) = sql.claim_by_lease(connection, levels, 1, token, token, 60_000)
            return fail(self.queue, "default", claimed[0], error, consumer=who, token=token, **options)
        seq = self.queue.objects.values_list("seq", flat=True).get()
        return fail(self.queue, "default", seq, error, consumer=who, token=None, **options)

    def kept(self) -> PoisonMessage:
        """It is poison and nowhere else, whole."""
        assert not self.queue.objects.exists()
        assert not DelayedMessage.objects.exists()
        row = PoisonMessage.objects.get()
        assert row.body == BODY
        assert row.queue == self.queue._meta.label
        return row


EVERY = pytest.mark.parametrize("message", [Message(Leased), Message(Transactional), Message(AtMostOnce)],
                                ids=lambda one: one.queue.__name__)  # fmt: skip
IN_ITS_TABLE = pytest.mark.parametrize("message", [Message(Leased), Message(Transactional)],
                                       ids=lambda one: one.queue.__name__)  # fmt: skip


# -- what a handler and a policy bring along ------------------------------------------------------------------------


@EVERY
@pytest.mark.parametrize("value", [object(), "yesterday", datetime(2026, 1, 1), b"\xff", float("nan"), {1: {2}}])
def test_what_a_handler_leaves_in_its_items_is_not_recorded_as_anything_else(message: Message, value: Any) -> None:
    message.put()

    message.fail(deciding(Poison("tests")), items={"at": value, "policy_error": value, value.__class__: value})

    row = message.kept()
    assert (row.reason, row.attempts) == ("tests", 1)
    assert row.first_failed_at is not None


@EVERY
@pytest.mark.parametrize(
    ("reason", "kept"),
    [(None, "no reason was given"), ("a\0b", "a\ufffdb"), ("\ud800!", "?!"), (7, "7"), ("x" * 9999, "x" * 500),
     ("🚀" * 400, "🚀" * 250), (Unspeakable(), "(its __str__ raised RuntimeError)")],
)  # fmt: skip
def test_a_reason_that_is_no_text_of_a_column_is_still_a_reason(message: Message, reason: Any, kept: str) -> None:
    message.put()

    verdict = message.fail(deciding(Poison(reason)))

    assert message.kept().reason == kept
    assert verdict == Poison(kept)


@IN_ITS_TABLE
@pytest.mark.parametrize("delay", [timedelta.max, timedelta(days=36501), "soon", 5, None])
def test_a_delay_that_makes_no_sense_leaves_the_decision_to_the_default_policy(message: Message, delay: Any) -> None:
    message.put()

    message.fail(consumer(lambda failure: RetryLater(delay), retry_delay=60))

    row = DelayedMessage.objects.annotate(wait=F("due") - F("stored_at")).get()
    assert timedelta(seconds=59) < row.wait < timedelta(minutes=5)
    assert not message.queue.objects.exists()


@IN_ITS_TABLE
def test_a_delay_into_the_past_is_none(message: Message) -> None:
    message.put()

    message.fail(deciding(RetryLater(timedelta.min)))

    assert dispatch_due("default", 10).moved == 1


class Broken(Poison):
    @property
    def reason(self) -> str:  # type: ignore[override]
        raise RuntimeError("no reason")

    def __init__(self) -> None: ...


@EVERY
@pytest.mark.parametrize("nonsense", [None, "poison", Poison, Broken(), Unspeakable()])
def test_what_is_no_verdict_leaves_the_decision_to_the_default_policy(message: Message, nonsense: Any) -> None:
    message.put()

    message.fail(consumer(lambda failure: nonsense, attempts=1))

    expected = "failed 1 of 1 attempts: Failed: bad"
    assert message.kept().reason == expected


@EVERY
def test_a_discarded_message_is_gone_whatever_its_reason(message: Message) -> None:
    message.put()

    assert message.fail(deciding(Discard("a\0\ud800"))) == Discard("a\ufffd?")

    assert not message.queue.objects.exists()
    assert not PoisonMessage.objects.exists()


@EVERY
@pytest.mark.parametrize("rude", ["close", "swallow", "raise"])
def test_a_policy_that_spoils_the_connection_costs_its_message_and_nothing_else(message: Message, rude: str) -> None:
    asked: list[int] = []

    def policy(failure: Any) -> Any:
        asked.append(1)
        if rude == "close":
            connection.close()
        if rude == "swallow":
            try:
                with connection.cursor() as cursor:
                    cursor.execute("SELECT 1 / 0")
            except Exception:
                pass
        if rude == "raise":
            raise Unspeakable
        return Poison("tests")

    message.put()
    message.fail(consumer(policy, attempts=1))

    message.kept()
    assert 1 <= len(asked) <= carrying_out.TRIES
    message.put()
    message.fail(deciding(Discard()))
    assert not message.queue.objects.exists(), "the connection is as good as before"


@EVERY
@pytest.mark.parametrize("error", [Unspeakable(), Failed("\0\ud800" * 9999), Fussy(), KeyError(Unspeakable())])
def test_whatever_was_raised_is_recorded(message: Message, error: BaseException) -> None:
    message.put()

    message.fail(consumer(attempts=1, unrecoverable=(Fussy,)), error)

    row = message.kept()
    assert type(error).__name__ in row.exception_type
    assert "\0" not in row.exception_message + row.traceback + row.reason


@EVERY
def test_receivers_of_djangos_signals_have_no_say_in_it(message: Message) -> None:
    def refuse(sender: Any, **kwargs: Any) -> None:
        if sender in (PoisonMessage, DelayedMessage):
            raise RuntimeError("not with me")

    post_save.connect(refuse)
    try:
        for verdict in (Poison("tests"), RetryLater(timedelta(0))):
            message.put()
            message.fail(deciding(verdict))
    finally:
        post_save.disconnect(refuse)

    assert PoisonMessage.objects.count() + DelayedMessage.objects.count() == 2


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


@pytest.mark.parametrize("failures", ["{", "7", "[7]", '[{"at":7}]', '[{"at":"0001-01-01T00:00:00+14:00"}]', '[{"attempt":"x"}]',
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
        pytest.skip("over, so nobody receives it")
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

    rows = queue_sql(AddressedUrgent, connection).claim_by_delete(
        connection, [Range(recipient=name) for name in ("", "first")], 10, whole=whole
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
    """A CHECK constraint that somebody has put on a table."""
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

    assert poison.requeue(PoisonMessage.objects.all()) == 1

    row = message.queue.objects.get()
    assert (row.body, row.headers, row.correlation_id) == (BODY, '{"k":"v"}', "c")


@EVERY
def test_a_poison_table_that_takes_nothing_is_told_and_the_message_stays(message: Message) -> None:
    if message.queue is AtMostOnce:
        pytest.skip("it is nowhere by then")
    message.put()
    with refusing("queueapp_poisonmessage", "false"), pytest.raises(Exception, match="refused"):
        message.fail(deciding(Poison("because")))

    assert message.queue.objects.count() == 1
    assert not PoisonMessage.objects.exists()


# -- what passes by itself ------------------------------------------------------------------------------------------


def lose_connection() -> None:
    """The server ends this thread's session."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        pid = cursor.fetchone()[0]

    def kill() -> None:
        with connections["default"].cursor() as other:
            other.execute("SELECT pg_terminate_backend(%s)", [pid])
        connections["default"].close()

    thread = threading.Thread(target=kill)
    thread.start()
    thread.join()


def test_a_connection_that_is_lost_is_told_and_nothing_is_changed() -> None:
    message = Message(Transactional)
    message.put()
    seq = Transactional.objects.get().seq
    lose_connection()

    with pytest.raises(Error) as caught:
        fail(Transactional, "default", seq, Failed(), consumer=deciding(Poison("tests")), token=None)

    assert is_passing(caught.value, "default")
    connection.close()
    assert Transactional.objects.get().failures is None
    assert not PoisonMessage.objects.exists()


@IN_ITS_TABLE
def test_a_connection_that_is_lost_while_a_policy_decides_costs_nothing(message: Message) -> None:
    asked: list[int] = []

    def policy(failure: Any) -> Any:
        asked.append(1)
        if len(asked) == 1:
            lose_connection()
        return Poison("tests")

    message.put()
    message.fail(consumer(policy))

    assert message.kept().reason == "tests"
    assert len(asked) == 2


def test_a_store_that_is_away_is_told_and_nothing_is_changed() -> None:
    message = Message(Leased)
    message.put()
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE queueapp_delayedmessage RENAME TO away")
    try:
        with pytest.raises(carrying_out.StoreFailed):
            message.fail(deciding(RetryLater(timedelta(1))))
    finally:
        with connection.cursor() as cursor:
            cursor.execute("ALTER TABLE away RENAME TO queueapp_delayedmessage")

    assert Leased.objects.get().failures is None


@EVERY
def test_what_happens_once_it_is_recorded_is_no_failure_of_it(message: Message, monkeypatch: Any) -> None:
    def speechless(*args: Any) -> None:
        raise RuntimeError("no words")

    monkeypatch.setattr(signals, "send", speechless)
    message.put()

    message.fail(deciding(Poison("tests")))

    message.kept()


# -- foreign tables -------------------------------------------------------------------------------------------------


@pytest.fixture
def foreign() -> Iterator[Message]:
    with connection.cursor() as cursor:
        cursor.execute(
            "CREATE TABLE foreign_postgres (Id uuid NOT NULL, Expires timestamp, Headers text NOT NULL, Body bytea, "
            "Seq serial NOT NULL)"
        )
    yield Message(ForeignPostgres)
    with connection.cursor() as cursor:
        cursor.execute("DROP TABLE foreign_postgres")


def test_a_nul_in_a_foreign_header_is_written_back_as_it_came(foreign: Message) -> None:
    foreign.put(r'{"a":"x\u0000y"}')
    for attempt in (1, 2):
        assert foreign.fail(deciding(RetryNow())) == RetryNow()
        row = ForeignPostgres.objects.get()
        assert rf'"a":"x\u0000y","queueapp.Attempts":"{attempt}"' in row.headers

    foreign.fail(deciding(Poison("tests")))

    row = foreign.kept()
    assert row.attempts == 3
    assert row.headers == r'{"a":"x\u0000y"}'


def test_foreign_headers_in_which_nothing_can_be_counted_are_not_retried_for_ever(foreign: Message) -> None:
    foreign.put("no JSON")

    foreign.fail(deciding(RetryNow()))

    row = foreign.kept()
    assert row.headers == "no JSON"
    assert "attempts cannot be counted" in row.reason


# -- the count ------------------------------------------------------------------------------------------------------


@IN_ITS_TABLE
def test_a_failed_attempt_is_counted_once_however_often_it_is_recorded(message: Message) -> None:
    message.put()
    for attempt in (1, 2, 3):
        message.fail(deciding(RetryNow()))
        row = message.queue.objects.get()
        assert attempts_of(row.failures) == attempt == len(read_failures(row.failures))
        assert row.deliveries == attempt


@pytest.mark.parametrize("session", [None, "America/New_York"])
def test_times_of_a_foreign_table_are_those_of_utc_whatever_this_process_thinks(
    foreign: Message, settings: Any, session: str | None
) -> None:
    when = datetime(2090, 1, 1, 12, 0, 0, 5, tzinfo=UTC)
    settings.TIME_ZONE = "Asia/Tokyo"
    in_zone(session)
    steps: list[Callable[[], Any]] = [
        lambda: foreign.put(expires=when),
        lambda: foreign.fail(deciding(RetryLater(timedelta(0)))),
        lambda: dispatch_due("default", 10),
        lambda: ForeignPostgres.objects.filter(expires=when).update(expires=when),
    ]
    try:
        for number, step in enumerate(steps):
            step()
            if number == 1:
                assert DelayedMessage.objects.get().expires == when
                continue
            with connection.cursor() as cursor:
                cursor.execute("SELECT expires::text, current_setting('TimeZone') FROM foreign_postgres")
                assert cursor.fetchall() == [("2090-01-01 12:00:00.000005", session or "UTC")], number
    finally:
        in_zone(None)


def in_zone(name: str | None) -> None:
    """As with this TIME_ZONE in DATABASES."""
    connection.close()
    connection.settings_dict["TIME_ZONE"] = name
    for cached in ("timezone", "timezone_name"):
        connections["default"].__dict__.pop(cached, None)
