"""Sessions that a handler has changed for good: not guard out again, on whichever alias, and not for nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import psycopg
import pytest
from django.db import DatabaseError, Error, IntegrityError, transaction
from django.db.backends.signals import connection_created
from psycopg import sql
from psycopg.types.string import TextLoader

from tests.testapp.models import Effect, Transactional
from tests.workers.connections.guarded_thread import GuardedThread

Handler = Callable[[GuardedThread], Any]


@pytest.fixture(autouse=True)
def on_postgresql(guarded: GuardedThread) -> None:
    if guarded.vendor != "postgresql":
        pytest.skip("the statements are PostgreSQL's")


def session(connection: Any) -> Any:
    return connection.connection


def of_its_own(guarded: GuardedThread) -> None:
    guarded.run("SET a.b = 'c'")


def composed(guarded: GuardedThread) -> None:
    with guarded.connection.cursor() as cursor:
        cursor.execute(sql.SQL("SET a.b = {}").format(sql.Literal("c")))


def in_a_function(guarded: GuardedThread) -> None:
    guarded.run("DO $$ BEGIN PERFORM set_config('search_path', 'public', false); END $$")


def of_the_driver(guarded: GuardedThread) -> None:
    guarded.connection.ensure_connection()
    guarded.connection.connection.read_only = True
    guarded.run("SELECT 1")


def adapted(guarded: GuardedThread) -> None:
    guarded.connection.connection.adapters.register_loader("int8", TextLoader)
    guarded.run("SELECT 1")


def notice_handler_added(guarded: GuardedThread) -> None:
    guarded.connection.connection.add_notice_handler(print)
    guarded.run("SELECT 1")


def failing_for_all(*_: Any) -> None:
    raise RuntimeError("a wrapper of another handler's")


def wrapped(guarded: GuardedThread) -> None:
    guarded.connection.execute_wrappers.append(failing_for_all)


def unwrapped(guarded: GuardedThread) -> None:
    guarded.connection.execute_wrappers.clear()


@pytest.mark.parametrize(
    "handler", [of_its_own, composed, in_a_function, of_the_driver, adapted, notice_handler_added, wrapped, unwrapped]
)
def test_changed_session_is_replaced_before_the_next_message(guarded: GuardedThread, handler: Handler) -> None:
    assert guarded.in_autocommit(lambda guarded: None) is None
    before = guarded.do(lambda: session(guarded.connection))

    assert guarded.in_autocommit(handler) is None
    assert guarded.do(lambda: session(guarded.connection)) is None

    assert before.closed
    assert guarded.guard.changed is not None
    guarded.works()


def test_in_the_workers_transaction_what_was_changed_is_committed_and_its_session_replaced_later(
    guarded: GuardedThread,
) -> None:
    guarded.server.put(Transactional)

    def act(guarded: GuardedThread) -> None:
        guarded.write("kept")
        of_its_own(guarded)

    assert guarded.in_transaction(act) is None
    assert guarded.guard.stale
    changed = guarded.do(lambda: session(guarded.connection))
    guarded.do(guarded.guard.restore)

    assert changed.closed
    assert len(guarded.effects("kept")) == 1
    guarded.works()


def test_a_wrapper_that_a_handler_leaves_is_taken_off_on_every_alias(guarded: GuardedThread) -> None:
    guarded.server.put(Transactional)
    guarded.in_autocommit(lambda guarded: guarded.write("before", guarded.elsewhere))

    def act(guarded: GuardedThread) -> None:
        guarded.second_alias.execute_wrappers.append(failing_for_all)
        wrapped(guarded)

    assert guarded.in_transaction(act) is None
    guarded.do(guarded.guard.restore)

    guarded.works()


def test_a_wrapper_that_comes_with_a_session_is_kept(guarded: GuardedThread) -> None:
    def observe(execute: Any, *values: Any) -> Any:
        return execute(*values)

    def on_creation(connection: Any, **_: Any) -> None:
        connection.execute_wrappers.append(observe)

    guarded.do(lambda: guarded.connection.close())
    connection_created.connect(on_creation)
    try:
        guarded.do(lambda: (guarded.call(lambda guarded: guarded.write("first")), guarded.guard.after(guarded.failed)))
        assert guarded.in_autocommit(lambda guarded: guarded.write("second")) is None
    finally:
        connection_created.disconnect(on_creation)

    assert guarded.guard.changed is None
    assert guarded.do(lambda: observe in guarded.connection.execute_wrappers)


def test_a_connection_that_a_handler_has_shared_with_its_threads_is_the_tasks_again(guarded: GuardedThread) -> None:
    def act(guarded: GuardedThread) -> None:
        guarded.connection.inc_thread_sharing()
        guarded.connection.force_debug_cursor = True
        guarded.write("shared")

    assert guarded.in_autocommit(act) is None
    connection = guarded.do(lambda: guarded.connection)

    with pytest.raises(DatabaseError, match="same thread"):
        connection.cursor()
    assert not connection.force_debug_cursor


def test_what_was_not_restored_is_replaced_before_the_next_handler_at_the_latest(guarded: GuardedThread) -> None:
    guarded.server.put(Transactional)
    assert guarded.in_transaction(of_its_own) is None
    changed = guarded.do(lambda: session(guarded.connection))
    assert not changed.closed

    found: list[Any] = []
    assert guarded.in_autocommit(lambda guarded: found.append(session(guarded.connection))) is None

    assert found == [None]
    assert changed.closed


def in_a_failed_transaction(guarded: GuardedThread) -> None:
    raw = guarded.connection.connection
    raw.execute("BEGIN")
    with suppress(psycopg.Error):
        raw.execute("nonsense")


def in_a_pipeline(guarded: GuardedThread) -> None:
    guarded.connection.connection.pgconn.enter_pipeline_mode()


@pytest.mark.parametrize("state", [in_a_failed_transaction, in_a_pipeline])
def test_unusable_session_is_not_handed_out(guarded: GuardedThread, state: Handler) -> None:
    """The state did not come from a handler."""
    guarded.in_autocommit(lambda guarded: None)
    before = guarded.do(lambda: session(guarded.connection))
    guarded.do(lambda: (state(guarded), guarded.guard.mark_used()))

    found: list[Any] = []
    assert guarded.in_autocommit(lambda guarded: found.append(session(guarded.connection))) is None

    assert found == [None]
    assert before.closed
    guarded.works()


def test_what_a_hook_has_changed_is_restored(guarded: GuardedThread) -> None:
    guarded.in_autocommit(lambda guarded: None)
    guarded.do(lambda: of_its_own(guarded))  # outside of every handler
    changed = guarded.do(lambda: session(guarded.connection))
    guarded.do(guarded.guard.restore)

    assert changed.closed


def test_changed_session_on_another_alias_is_closed(guarded: GuardedThread) -> None:
    guarded.in_autocommit(lambda guarded: guarded.run("SELECT 1", guarded.elsewhere))
    before = guarded.do(lambda: session(guarded.second_alias))

    assert guarded.in_autocommit(lambda guarded: guarded.run("SET a.b = 'c'", guarded.elsewhere)) is None

    assert before.closed
    assert guarded.do(lambda: session(guarded.second_alias)) is None
    guarded.works()


def test_changed_session_on_another_alias_that_was_first_used_by_that_handler_is_closed(guarded: GuardedThread) -> None:
    changed: list[Any] = []

    def act(guarded: GuardedThread) -> None:
        guarded.run("SET a.b = 'c'", guarded.elsewhere)
        changed.append(session(guarded.second_alias))

    assert guarded.in_autocommit(act) is None

    assert changed[0].closed
    guarded.works()


def test_session_on_another_alias_that_was_not_changed_is_kept(guarded: GuardedThread) -> None:
    guarded.in_autocommit(lambda guarded: guarded.run("SELECT 1", guarded.elsewhere))
    before = guarded.do(lambda: session(guarded.second_alias))
    for _ in range(2):
        guarded.in_autocommit(lambda guarded: guarded.write("kept", guarded.elsewhere))

    assert guarded.do(lambda: session(guarded.second_alias)) is before


def refused(guarded: GuardedThread) -> None:
    guarded.run("SELECT * FROM no_such_table")


def read_only(guarded: GuardedThread) -> None:
    guarded.connection.connection.execute("SET default_transaction_read_only = on")
    guarded.write("refused")


def in_the_way(guarded: GuardedThread) -> None:
    effect = Effect.objects.using(guarded.alias).create(name="there")
    Effect.objects.using(guarded.alias).create(pk=effect.pk, name="taken")


@pytest.mark.parametrize(("handler", "kept"), [(refused, False), (read_only, False), (in_the_way, True)])
def test_after_a_statement_that_was_refused_the_next_message_gets_another_session(
    guarded: GuardedThread, handler: Handler, kept: bool
) -> None:
    """An unseen change may be why, and then only the first message fails of it."""
    guarded.in_autocommit(lambda guarded: None)
    before = guarded.do(lambda: session(guarded.connection))
    guarded.in_autocommit(handler)

    assert isinstance(guarded.failed, Error)
    assert isinstance(guarded.failed, IntegrityError) is kept
    assert before.closed is not kept
    guarded.works()


@pytest.fixture
def set_up() -> Iterator[list[None]]:
    """A project that sets up each session when it is opened; one entry each time."""
    times: list[None] = []

    def receiver(*, connection: Any, **_: Any) -> None:
        times.append(None)
        with connection.cursor() as cursor:
            cursor.execute("SET a.b = 'the project''s'")

    connection_created.connect(receiver)
    receivers = connection_created.receivers
    receivers.insert(0, receivers.pop())  # as if it had been there before the worker
    connection_created.sender_receivers_cache.clear()
    yield times
    connection_created.disconnect(receiver)


def test_what_a_project_sets_when_a_session_is_opened_is_not_the_handlers(
    guarded: GuardedThread, set_up: list[None]
) -> None:
    guarded.do(lambda: guarded.connection.close())
    for _ in range(3):
        guarded.in_autocommit(lambda guarded: (guarded.write("kept"), guarded.write("kept", guarded.elsewhere)))
        assert guarded.guard.changed is None

    assert len(set_up) == 2, "one session on each alias"


def test_what_is_set_for_a_transaction_alone_keeps_the_session(guarded: GuardedThread) -> None:
    guarded.in_autocommit(lambda guarded: None)
    before = guarded.do(lambda: session(guarded.connection))

    def act(guarded: GuardedThread) -> None:
        with transaction.atomic(using=guarded.alias):
            guarded.run("SET LOCAL a.b = 'c'")

    guarded.in_autocommit(act)

    assert guarded.do(lambda: session(guarded.connection)) is before


def behind_a_long_one(guarded: GuardedThread) -> None:
    guarded.run(f"SELECT {', '.join(['1'] * 1000)}; SET a.b = 'c'")


def by_a_parameter(guarded: GuardedThread) -> None:
    with guarded.connection.cursor() as cursor:
        cursor.execute("SELECT set_config('a.b', %s, %s)", ["true", False])


def many_times(guarded: GuardedThread) -> None:
    with guarded.connection.cursor() as cursor:
        cursor.executemany("SELECT set_config('a.b', %s, %s)", [("c", True), ("c", False)])


def for_now_by_a_parameter(guarded: GuardedThread) -> None:
    with guarded.connection.cursor() as cursor:
        cursor.execute("SELECT set_config('a.b', %s, %s)", ["c", True])


def long_with_a_semicolon(guarded: GuardedThread) -> None:
    guarded.run(f"SELECT {', '.join(['1'] * 1000)}, '; SET a.b = 1'")


@pytest.mark.parametrize("handler", [behind_a_long_one, by_a_parameter, many_times])
def test_a_change_behind_a_long_statement_or_by_a_parameter_is_seen(guarded: GuardedThread, handler: Handler) -> None:
    guarded.in_autocommit(lambda guarded: None)
    before = guarded.do(lambda: session(guarded.connection))

    assert guarded.in_autocommit(handler) is None

    assert guarded.guard.changed is not None
    assert before.closed


@pytest.mark.parametrize("handler", [for_now_by_a_parameter, long_with_a_semicolon])
def test_what_its_parameters_or_literals_explain_keeps_the_session(guarded: GuardedThread, handler: Handler) -> None:
    guarded.in_autocommit(lambda guarded: None)
    before = guarded.do(lambda: session(guarded.connection))

    assert guarded.in_autocommit(handler) is None

    assert guarded.guard.changed is None
    assert guarded.do(lambda: session(guarded.connection)) is before


HARMLESS = [
    "INSERT INTO a VALUES ('one; RESET all')",
    "UPDATE a SET b = 'dear; set c'",
    "SELECT $$; SET a.b = c$$",
    "SELECT $q$ it's; SET a.b = c$q$",
    r"SELECT E'\'; SET a.b = c'",
    "UPDATE a /* why */ SET b = 1",
    "UPDATE a -- why;\n SET b = 1",
    "INSERT INTO a VALUES ('cut; SET b = 1",  # the beginning of a long one
    "INSERT INTO a VALUES (1) ON CONFLICT (b) DO UPDATE SET b = 1",
    "SET CONSTRAINTS ALL IMMEDIATE",
    "SET /* why */ LOCAL a.b = 1",
    "SELECT set_config('a.b', current_setting('a.c'), true)",
    "SELECT set_config('a.b', 'c(', true)",
    "SELECT set_config('a.b', 'c', is_local => true)",
    "SELECT set_config('a.b', 'c', true::boolean)",
    "SELECT 'pg_advisory_lock(1)'",
    "SELECT pg_advisory_xact_lock(1)",
    "CREATE TEMP TABLE a (b text DEFAULT ';') ON COMMIT DROP",
    "DECLARE a CURSOR FOR SELECT ' WITH HOLD '",
    "SAVEPOINT a",
    "DO $$ BEGIN UPDATE a SET b = 1; SET LOCAL a.b = 1; END $$",
]
CHANGING = [
    "SELECT 'a;b'; SET a.b = 1",
    "/* a */ /* b */ -- c\n SET a.b = 1",
    "/* /* a */ */ SET a.b = 1",
    "SET/**/a.b = 1",
    'SELECT "it\'s"; SET a.b = 1',
    "CREATE OR REPLACE TEMP VIEW a AS SELECT 1",
    "CREATE TABLE pg_temp.a (b int)",
    "SELECT 1 AS a INTO pg_temp.b",
    "CREATE TEMP TABLE a (b int); CREATE TEMP TABLE c (d int) ON COMMIT DROP",
    "CREATE TEMP TABLE a (b text DEFAULT ' ON COMMIT DROP ')",
    "SELECT set_config('a.b', 'c, true)', false)",
    "SELECT \"set_config\"('a.b', 'c', false)",
    "UPDATE pg_settings SET setting = 'b' WHERE name = 'a.b'",
    "DO $$ BEGIN SET a.b = 1; END $$",
    "DO $$ BEGIN IF true THEN SET a.b = 1; END IF; END $$",
    "DO $$ BEGIN PERFORM set_config('a.b', 'c', false); END $$",
]


@pytest.mark.parametrize("statement", HARMLESS)
def test_what_only_looks_like_a_change_keeps_the_session(guarded: GuardedThread, statement: str) -> None:
    assert not guarded.server.backend.sessions.changes_session(statement)


@pytest.mark.parametrize("statement", CHANGING)
def test_a_change_is_seen_however_it_is_written(guarded: GuardedThread, statement: str) -> None:
    assert guarded.server.backend.sessions.changes_session(statement)
