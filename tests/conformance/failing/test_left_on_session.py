"""What a handler changes for good, of its session, its thread or its process, is not the next message's: each finds all
that as the first one did, and every message is handled once."""

from __future__ import annotations

import asyncio
import contextvars
import decimal
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from django.db import connections, transaction
from django.utils import timezone, translation

from queueapp import Context, signals
from tests.conformance.endpoint import Endpoint, Note, modes
from tests.in_process_worker import eventually
from tests.testapp.models import Effect

#: A message with this number is rude, the others are innocent.
RUDE = 3


def _sql(statement: str) -> Callable[[str], None]:
    def run(alias: str) -> None:
        with connections[alias].cursor() as cursor:
            cursor.execute(statement)

    return run


POSTGRESQL = {
    "another schema": "SET search_path = nowhere",
    "another schema, by a function": "SELECT set_config('search_path', 'nowhere', false)",
    "another schema, in a block": "DO $$ BEGIN PERFORM set_config('search_path', 'nowhere', false); END $$",
    "another role": "SET ROLE pg_monitor",
    "the role of the connection": "RESET ROLE",
    "what the server has set": "RESET ALL",
    "another user": "SET SESSION AUTHORIZATION pg_monitor",
    "no time": "SET statement_timeout = '1ms'",
    "another time zone": "SET TIME ZONE 'Pacific/Kiritimati'",
    "read only": "SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY",
    "a table": "CREATE TEMPORARY TABLE testapp_effect (id bigint, name text, at timestamptz)",
    "nothing prepared": "DEALLOCATE ALL",
    "a channel": "/* of an application */ LISTEN to_nobody",
    "a lock": "SELECT pg_advisory_lock(4711)",
    "a cursor": "-- kept\nDECLARE kept CURSOR WITH HOLD FOR SELECT 1",
}
#: Refused in a transaction.
IN_AUTOCOMMIT = {"nothing at all": "DISCARD ALL"}
SQL_SERVER = {
    "one row": "SET ROWCOUNT 1",
    "no time": "SET LOCK_TIMEOUT 1",
    "another language": "SET LANGUAGE Deutsch",
    "another isolation": "SET TRANSACTION ISOLATION LEVEL SERIALIZABLE",
    "a table": "CREATE TABLE #kept (id int)",
}


def session_of(alias: str) -> tuple[Any, ...]:
    """What a handler can see of its session."""
    if connections[alias].vendor != "postgresql":
        return ()
    with connections[alias].cursor() as cursor:
        cursor.execute(
            "SELECT current_setting('search_path'), current_user, session_user, current_setting('statement_timeout'), "
            "current_setting('TimeZone'), current_setting('transaction_read_only'), (SELECT count(*) FROM pg_cursors), "
            "(SELECT count(*) FROM pg_listening_channels()), to_regclass('pg_temp.testapp_effect')::text, "
            "(SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid())"
        )
        found = cursor.fetchone()
    assert found is not None
    return tuple(found)


def statements(endpoint: Endpoint) -> dict[str, str]:
    if connections[endpoint.alias].vendor != "postgresql":
        return SQL_SERVER
    return POSTGRESQL | ({} if endpoint.queue.delivery.semantics.value == "transactional" else IN_AUTOCOMMIT)


def find(endpoint: Endpoint, what: str) -> Callable[[str], None]:
    statement = statements(endpoint).get(what)
    if statement is None:
        pytest.skip("not on this database, or refused in a transaction")
    return _sql(statement)


def affects_no_other_message(
    endpoint: Endpoint, abuse: Callable[[str], None], look: Callable[[str], Any], *, alias: str = ""
) -> None:
    """One message abuses; before and behind it, on the same thread, everything looks the same, and each is handled
    once."""
    seen: list[Any] = []

    def act(message: Note, context: Context) -> None:
        if message.number == RUDE:
            Effect.objects.using(context.alias).create(name=str(message.number))
            abuse(alias or context.alias)
            return
        seen.append(look(alias or context.alias))
        Effect.objects.using(context.alias).create(name=str(message.number))

    endpoint.handle(act, attempts=1)
    endpoint.send_many(8)
    worker = endpoint.start(concurrency=1)
    endpoint.wait_until_empty()
    eventually(lambda: len(endpoint.calls) == 8)
    endpoint.send(9)
    eventually(lambda: Effect.objects.using(endpoint.alias).count() == 9)
    endpoint.wait_until_empty()

    assert sorted(endpoint.calls) == [(number, 1) for number in (*range(8), 9)]
    assert len(set(map(repr, seen))) == 1, seen
    assert not endpoint.poison.exists()
    assert worker.pump.stats.lost == 0
    assert not worker.pump.state.health.degraded()


@modes("NRS")
@pytest.mark.parametrize("what", sorted(POSTGRESQL | IN_AUTOCOMMIT | SQL_SERVER))
def test_when_a_handler_changes_its_session_should_give_the_next_message_another(
    endpoint: Endpoint, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    affects_no_other_message(endpoint, find(endpoint, what), session_of)

    assert caplog.text.count("changes its database session permanently") == 1
    assert "Nothing is prepared" not in caplog.text, "that would make all of this process slower"


def with_the_driver(alias: str) -> None:
    connections[alias].connection.row_factory = dict_row


def dict_row(cursor: Any) -> Any:
    return lambda values: dict(enumerate(values))


@modes("NR")
def test_when_a_handler_changes_the_drivers_connection_should_give_the_next_message_another(endpoint: Endpoint) -> None:
    if connections[endpoint.alias].vendor != "postgresql":
        pytest.skip("psycopg's own")
    affects_no_other_message(endpoint, with_the_driver, session_of)


def fail_every_statement(execute: Any, *_: Any) -> Any:
    raise RuntimeError("a wrapper of another handler's")


def with_a_wrapper(alias: str) -> None:
    connections[alias].execute_wrappers.append(fail_every_statement)


@modes("NRST")
@pytest.mark.parametrize("failing", [False, True])
def test_when_a_handler_leaves_a_wrapper_of_statements_should_take_it_off(endpoint: Endpoint, failing: bool) -> None:
    """It would fail the messages that follow, and keep the failure of this one from being recorded."""

    def act(message: Note, context: Context) -> None:
        if message.number == RUDE:
            with_a_wrapper(context.alias)
            if failing:
                raise ValueError("bad")
        else:
            Effect.objects.using(context.alias).create(name=str(message.number))

    endpoint.handle(act, attempts=1)
    endpoint.send_many(8)
    endpoint.start(concurrency=1)
    endpoint.wait_until_empty()

    eventually(lambda: Effect.objects.using(endpoint.alias).count() == 7)
    eventually(lambda: endpoint.poison.count() == failing)
    assert set(endpoint.calls) == {(number, 1) for number in range(8)}


@modes("NRS")
@pytest.mark.parametrize("statement", ["SET LOCAL statement_timeout = '10s'", "SELECT set_config('a.b', 'c', true)"])
def test_when_a_handler_changes_its_transaction_alone_should_keep_the_session(
    endpoint: Endpoint, statement: str, caplog: pytest.LogCaptureFixture
) -> None:
    if connections[endpoint.alias].vendor != "postgresql":
        pytest.skip("T-SQL has no such thing")

    def process(alias: str) -> Any:
        return connections[alias].connection.info.backend_pid

    def local(alias: str) -> None:
        with transaction.atomic(using=alias):
            _sql(statement)(alias)

    affects_no_other_message(endpoint, local, process)

    assert "for good" not in caplog.text


@modes("S")
def test_when_a_hook_changes_the_session_should_give_the_next_message_another(endpoint: Endpoint) -> None:
    if connections[endpoint.alias].vendor != "postgresql":
        pytest.skip("the statement is PostgreSQL's")

    def abuse(alias: str) -> None:
        transaction.on_commit(lambda: _sql("SET search_path = nowhere")(alias), using=alias)

    affects_no_other_message(endpoint, abuse, session_of)


# -- of the thread and of the process --------------------------------------------------------------------------------

variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="none")


def speak_another_language(alias: str) -> None:
    translation.activate("de")


def live_elsewhere(alias: str) -> None:
    timezone.activate("Pacific/Kiritimati")


def set_a_variable(alias: str) -> None:
    variable.set("mine")


def count_with_two_digits(alias: str) -> None:
    decimal.getcontext().prec = 2


def allow_no_calls(alias: str) -> None:
    sys.setrecursionlimit(80)


def leave_a_loop_running(alias: str) -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    asyncio._set_running_loop(loop)  # as a time limit does that interrupts the end of a loop


def surroundings(alias: str) -> Any:
    return (
        translation.get_language(),
        timezone.get_current_timezone_name(),
        variable.get(),
        decimal.getcontext().prec,
        sys.getrecursionlimit(),
        threading.current_thread().name,
    )


@pytest.mark.parametrize(
    "abuse",
    [
        speak_another_language,
        live_elsewhere,
        set_a_variable,
        count_with_two_digits,
        allow_no_calls,
        leave_a_loop_running,
    ],
)
def test_when_a_handler_changes_its_surroundings_should_give_the_next_message_its_own(
    endpoint: Endpoint, abuse: Callable[[str], None]
) -> None:
    affects_no_other_message(endpoint, abuse, surroundings)


@modes("S")
def test_when_a_message_has_a_hook_should_run_it_in_the_variables_of_its_handler(endpoint: Endpoint) -> None:
    seen: list[str] = []

    def act(message: Note, context: Context) -> None:
        variable.set(str(message.number))
        transaction.on_commit(lambda: seen.append(variable.get()), using=endpoint.alias)

    endpoint.handle(act)
    endpoint.send_many(3)
    endpoint.start(concurrency=1)

    eventually(lambda: seen == ["0", "1", "2"])


def test_when_a_receiver_of_a_signal_changes_its_surroundings_should_keep_them_from_the_next_message(
    endpoint: Endpoint,
) -> None:
    seen: list[str] = []

    def act(message: Note, context: Context) -> None:
        seen.append(variable.get())
        if message.number == 0:
            raise ValueError

    def receiver(sender: Any, **_: Any) -> None:
        variable.set("a receiver's")

    signals.poisoned.connect(receiver, sender=endpoint.queue)
    try:
        endpoint.handle(act, attempts=1)
        endpoint.send(0)
        endpoint.start(concurrency=1)
        eventually(endpoint.poison.exists)
        endpoint.send(1)
        eventually(lambda: len(seen) == 2)
    finally:
        signals.poisoned.disconnect(receiver, sender=endpoint.queue)

    assert seen == ["none", "none"]
