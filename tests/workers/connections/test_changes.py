"""Sessions that a handler has changed for good: not handed out again, on whichever alias, and not for nothing."""

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
from tests.workers.connections.desk import Desk

Handler = Callable[[Desk], Any]


@pytest.fixture(autouse=True)
def on_postgresql(desk: Desk) -> None:
    if desk.vendor != "postgresql":
        pytest.skip("the statements are PostgreSQL's")


def session(connection: Any) -> Any:
    return connection.connection


def of_its_own(desk: Desk) -> None:
    desk.run("SET a.b = 'c'")


def composed(desk: Desk) -> None:
    with desk.connection.cursor() as cursor:
        cursor.execute(sql.SQL("SET a.b = {}").format(sql.Literal("c")))


def in_a_function(desk: Desk) -> None:
    desk.run("DO $$ BEGIN PERFORM set_config('search_path', 'public', false); END $$")


def of_the_driver(desk: Desk) -> None:
    desk.connection.ensure_connection()
    desk.connection.connection.read_only = True
    desk.run("SELECT 1")


def adapted(desk: Desk) -> None:
    desk.connection.connection.adapters.register_loader("int8", TextLoader)
    desk.run("SELECT 1")


def told_of_notices(desk: Desk) -> None:
    desk.connection.connection.add_notice_handler(print)
    desk.run("SELECT 1")


def failing_for_all(*_: Any) -> None:
    raise RuntimeError("a wrapper of another handler's")


def wrapped(desk: Desk) -> None:
    desk.connection.execute_wrappers.append(failing_for_all)


def unwrapped(desk: Desk) -> None:
    desk.connection.execute_wrappers.clear()


@pytest.mark.parametrize(
    "handler", [of_its_own, composed, in_a_function, of_the_driver, adapted, told_of_notices, wrapped, unwrapped]
)
def test_changed_session_is_replaced_before_the_next_message(desk: Desk, handler: Handler) -> None:
    assert desk.in_autocommit(lambda desk: None) is None
    before = desk.do(lambda: session(desk.connection))

    assert desk.in_autocommit(handler) is None
    assert desk.do(lambda: session(desk.connection)) is None

    assert before.closed
    assert desk.handed.changed is not None
    desk.works()


def test_in_the_workers_transaction_what_was_changed_is_committed_and_its_session_replaced_later(desk: Desk) -> None:
    desk.server.put(Transactional)

    def act(desk: Desk) -> None:
        desk.write("kept")
        of_its_own(desk)

    assert desk.in_transaction(act) is None
    assert desk.handed.stale
    changed = desk.do(lambda: session(desk.connection))
    desk.do(desk.handed.mend)

    assert changed.closed
    assert len(desk.effects("kept")) == 1
    desk.works()


def test_a_wrapper_that_a_handler_leaves_is_taken_off_on_every_alias(desk: Desk) -> None:
    desk.server.put(Transactional)
    desk.in_autocommit(lambda desk: desk.write("before", desk.elsewhere))

    def act(desk: Desk) -> None:
        desk.other.execute_wrappers.append(failing_for_all)
        wrapped(desk)

    assert desk.in_transaction(act) is None
    desk.do(desk.handed.mend)

    desk.works()


def test_a_wrapper_that_comes_with_a_session_is_kept(desk: Desk) -> None:
    def observe(execute: Any, *values: Any) -> Any:
        return execute(*values)

    def on_creation(connection: Any, **_: Any) -> None:
        connection.execute_wrappers.append(observe)

    desk.do(lambda: desk.connection.close())
    connection_created.connect(on_creation)
    try:
        desk.do(lambda: (desk.call(lambda desk: desk.write("first")), desk.handed.after(desk.failed)))
        assert desk.in_autocommit(lambda desk: desk.write("second")) is None
    finally:
        connection_created.disconnect(on_creation)

    assert desk.handed.changed is None
    assert desk.do(lambda: observe in desk.connection.execute_wrappers)


def test_a_connection_that_a_handler_has_shared_with_its_threads_is_the_tasks_again(desk: Desk) -> None:
    def act(desk: Desk) -> None:
        desk.connection.inc_thread_sharing()
        desk.connection.force_debug_cursor = True
        desk.write("shared")

    assert desk.in_autocommit(act) is None
    connection = desk.do(lambda: desk.connection)

    with pytest.raises(DatabaseError, match="same thread"):
        connection.cursor()
    assert not connection.force_debug_cursor


def test_what_was_not_mended_is_replaced_before_the_next_handler_at_the_latest(desk: Desk) -> None:
    desk.server.put(Transactional)
    assert desk.in_transaction(of_its_own) is None
    changed = desk.do(lambda: session(desk.connection))
    assert not changed.closed

    found: list[Any] = []
    assert desk.in_autocommit(lambda desk: found.append(session(desk.connection))) is None

    assert found == [None]
    assert changed.closed


def in_a_failed_transaction(desk: Desk) -> None:
    raw = desk.connection.connection
    raw.execute("BEGIN")
    with suppress(psycopg.Error):
        raw.execute("nonsense")


def in_a_pipeline(desk: Desk) -> None:
    desk.connection.connection.pgconn.enter_pipeline_mode()


@pytest.mark.parametrize("left", [in_a_failed_transaction, in_a_pipeline])
def test_session_that_nobody_can_work_with_is_not_handed_out(desk: Desk, left: Handler) -> None:
    """Whoever has left it so: it was no handler."""
    desk.in_autocommit(lambda desk: None)
    before = desk.do(lambda: session(desk.connection))
    desk.do(lambda: (left(desk), desk.handed.used()))

    found: list[Any] = []
    assert desk.in_autocommit(lambda desk: found.append(session(desk.connection))) is None

    assert found == [None]
    assert before.closed
    desk.works()


def test_what_a_hook_has_changed_is_mended(desk: Desk) -> None:
    desk.in_autocommit(lambda desk: None)
    desk.do(lambda: of_its_own(desk))  # outside of every handler
    changed = desk.do(lambda: session(desk.connection))
    desk.do(desk.handed.mend)

    assert changed.closed


def test_changed_session_on_another_alias_is_closed(desk: Desk) -> None:
    desk.in_autocommit(lambda desk: desk.run("SELECT 1", desk.elsewhere))
    before = desk.do(lambda: session(desk.other))

    assert desk.in_autocommit(lambda desk: desk.run("SET a.b = 'c'", desk.elsewhere)) is None

    assert before.closed
    assert desk.do(lambda: session(desk.other)) is None
    desk.works()


def test_changed_session_on_another_alias_that_was_first_used_by_that_handler_is_closed(desk: Desk) -> None:
    changed: list[Any] = []

    def act(desk: Desk) -> None:
        desk.run("SET a.b = 'c'", desk.elsewhere)
        changed.append(session(desk.other))

    assert desk.in_autocommit(act) is None

    assert changed[0].closed
    desk.works()


def test_session_on_another_alias_that_was_not_changed_is_kept(desk: Desk) -> None:
    desk.in_autocommit(lambda desk: desk.run("SELECT 1", desk.elsewhere))
    before = desk.do(lambda: session(desk.other))
    for _ in range(2):
        desk.in_autocommit(lambda desk: desk.write("kept", desk.elsewhere))

    assert desk.do(lambda: session(desk.other)) is before


def refused(desk: Desk) -> None:
    desk.run("SELECT * FROM no_such_table")


def read_only(desk: Desk) -> None:
    desk.connection.connection.execute("SET default_transaction_read_only = on")
    desk.write("refused")


def in_the_way(desk: Desk) -> None:
    one = Effect.objects.using(desk.alias).create(name="there")
    Effect.objects.using(desk.alias).create(pk=one.pk, name="taken")


@pytest.mark.parametrize(("handler", "kept"), [(refused, False), (read_only, False), (in_the_way, True)])
def test_after_a_statement_that_was_refused_the_next_message_gets_another_session(
    desk: Desk, handler: Handler, kept: bool
) -> None:
    """An unseen change may be why, and then only the first message fails of it."""
    desk.in_autocommit(lambda desk: None)
    before = desk.do(lambda: session(desk.connection))
    desk.in_autocommit(handler)

    assert isinstance(desk.failed, Error)
    assert isinstance(desk.failed, IntegrityError) is kept
    assert before.closed is not kept
    desk.works()


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


def test_what_a_project_sets_when_a_session_is_opened_is_not_the_handlers(desk: Desk, set_up: list[None]) -> None:
    desk.do(lambda: desk.connection.close())
    for _ in range(3):
        desk.in_autocommit(lambda desk: (desk.write("kept"), desk.write("kept", desk.elsewhere)))
        assert desk.handed.changed is None

    assert len(set_up) == 2, "one session on each alias"


def test_what_is_set_for_a_transaction_alone_keeps_the_session(desk: Desk) -> None:
    desk.in_autocommit(lambda desk: None)
    before = desk.do(lambda: session(desk.connection))

    def act(desk: Desk) -> None:
        with transaction.atomic(using=desk.alias):
            desk.run("SET LOCAL a.b = 'c'")

    desk.in_autocommit(act)

    assert desk.do(lambda: session(desk.connection)) is before


def behind_a_long_one(desk: Desk) -> None:
    desk.run(f"SELECT {', '.join(['1'] * 1000)}; SET a.b = 'c'")


def by_a_parameter(desk: Desk) -> None:
    with desk.connection.cursor() as cursor:
        cursor.execute("SELECT set_config('a.b', %s, %s)", ["true", False])


def many_times(desk: Desk) -> None:
    with desk.connection.cursor() as cursor:
        cursor.executemany("SELECT set_config('a.b', %s, %s)", [("c", True), ("c", False)])


def for_now_by_a_parameter(desk: Desk) -> None:
    with desk.connection.cursor() as cursor:
        cursor.execute("SELECT set_config('a.b', %s, %s)", ["c", True])


def long_with_a_semicolon(desk: Desk) -> None:
    desk.run(f"SELECT {', '.join(['1'] * 1000)}, '; SET a.b = 1'")


@pytest.mark.parametrize("handler", [behind_a_long_one, by_a_parameter, many_times])
def test_a_change_behind_a_long_statement_or_by_a_parameter_is_seen(desk: Desk, handler: Handler) -> None:
    desk.in_autocommit(lambda desk: None)
    before = desk.do(lambda: session(desk.connection))

    assert desk.in_autocommit(handler) is None

    assert desk.handed.changed is not None
    assert before.closed


@pytest.mark.parametrize("handler", [for_now_by_a_parameter, long_with_a_semicolon])
def test_what_its_parameters_or_literals_explain_keeps_the_session(desk: Desk, handler: Handler) -> None:
    desk.in_autocommit(lambda desk: None)
    before = desk.do(lambda: session(desk.connection))

    assert desk.in_autocommit(handler) is None

    assert desk.handed.changed is None
    assert desk.do(lambda: session(desk.connection)) is before


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
def test_what_only_looks_like_a_change_keeps_the_session(desk: Desk, statement: str) -> None:
    assert not desk.server.backend.sessions.changes_session(statement)


@pytest.mark.parametrize("statement", CHANGING)
def test_a_change_is_seen_however_it_is_written(desk: Desk, statement: str) -> None:
    assert desk.server.backend.sessions.changes_session(statement)
