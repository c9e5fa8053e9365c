"""What handlers leave behind on other aliases: said where work is lost, mended before the next message in any case."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from django.db import Error, connections, transaction
from django.db.backends.sqlite3 import base as sqlite

from tests.testapp.models import Transactional
from tests.workers.connections.guarded_thread import GuardedThread

Handler = Callable[[GuardedThread], Any]


def leaves_an_atomic_block_open(guarded: GuardedThread) -> None:
    transaction.atomic(using=guarded.elsewhere).__enter__()
    guarded.write("abuse", guarded.elsewhere)


def leaves_a_failed_block_open(guarded: GuardedThread) -> None:
    transaction.atomic(using=guarded.elsewhere).__enter__()
    with suppress(Error):
        guarded.run("SELECT * FROM no_such_table", guarded.elsewhere)


def turns_autocommit_off(guarded: GuardedThread) -> None:
    transaction.set_autocommit(False, using=guarded.elsewhere)
    guarded.write("abuse", guarded.elsewhere)


def turns_autocommit_off_beneath_django(guarded: GuardedThread) -> None:
    guarded.second_alias.ensure_connection()
    guarded.second_alias.connection.autocommit = False
    guarded.write("abuse", guarded.elsewhere)


def begins_by_itself(guarded: GuardedThread) -> None:
    guarded.run("BEGIN", guarded.elsewhere)
    guarded.write("abuse", guarded.elsewhere)


def closes_inside_of_a_block(guarded: GuardedThread) -> None:
    with transaction.atomic(using=guarded.elsewhere):
        guarded.write("abuse", guarded.elsewhere)
        guarded.second_alias.close()


def asked_without_an_error(guarded: GuardedThread, handler: Handler) -> None:
    """Skip what is noticed on PostgreSQL only; in the test's own thread, where a skip is one."""
    if handler is begins_by_itself and guarded.vendor != "postgresql":
        pytest.skip("only an error makes the worker ask SQL Server")


ABUSES = [
    leaves_an_atomic_block_open,
    leaves_a_failed_block_open,
    turns_autocommit_off,
    turns_autocommit_off_beneath_django,
    begins_by_itself,
    closes_inside_of_a_block,
]


@pytest.mark.parametrize("handler", ABUSES)
def test_work_left_on_another_alias_is_a_failed_attempt_that_names_it(guarded: GuardedThread, handler: Handler) -> None:
    asked_without_an_error(guarded, handler)
    state = guarded.in_autocommit(handler)

    assert state is not None
    assert not state.replaced, "the task's own session has nothing to do with it"
    assert repr(guarded.elsewhere) in str(state)
    assert ("closed" in str(state)) is (handler is closes_inside_of_a_block)
    assert guarded.effects("abuse") == []
    guarded.works()


@pytest.mark.parametrize("handler", ABUSES)
def test_work_left_on_another_alias_takes_the_workers_transaction_with_it(
    guarded: GuardedThread, handler: Handler
) -> None:
    asked_without_an_error(guarded, handler)
    messages = guarded.server.put(Transactional)

    def also_writes(guarded: GuardedThread) -> None:
        guarded.write("abuse")
        handler(guarded)

    state = guarded.in_transaction(also_writes)

    assert state is not None
    assert not state.replaced
    assert repr(guarded.elsewhere) in str(state)
    assert guarded.messages() == messages
    assert guarded.effects("abuse") == []
    guarded.works()


@pytest.mark.parametrize("handler", ABUSES)
def test_handler_that_raises_as_well_has_its_own_reason(guarded: GuardedThread, handler: Handler) -> None:
    asked_without_an_error(guarded, handler)

    def raises(guarded: GuardedThread) -> None:
        handler(guarded)
        raise ValueError("no such flight")

    assert guarded.in_autocommit(raises) is None
    assert isinstance(guarded.failed, ValueError)
    assert guarded.effects("abuse") == []
    guarded.works()


def test_own_alias_and_another_are_both_named(guarded: GuardedThread) -> None:
    def abuses_both(guarded: GuardedThread) -> None:
        leaves_an_atomic_block_open(guarded)
        guarded.connection.close()

    state = guarded.in_autocommit(abuses_both)

    assert state is not None
    assert state.replaced
    assert [alias in reason for alias, reason in zip((guarded.alias, guarded.elsewhere), state.reasons, strict=True)]
    guarded.works()


# -- what a handler may do there ---------------------------------------------------------------------------------------


def writes(guarded: GuardedThread) -> None:
    guarded.write("kept", guarded.elsewhere)


def test_session_on_another_alias_is_kept_from_message_to_message(guarded: GuardedThread) -> None:
    sessions = []

    def remembers(guarded: GuardedThread) -> None:
        with transaction.atomic(using=guarded.elsewhere):
            writes(guarded)
        with suppress(KeyError), transaction.atomic(using=guarded.elsewhere):
            raise KeyError
        sessions.append(guarded.second_alias.connection)

    for _ in range(3):
        assert guarded.in_autocommit(remembers) is None
    guarded.server.put(Transactional)
    assert guarded.in_transaction(remembers) is None

    assert len({id(session) for session in sessions}) == 1
    assert len(guarded.effects("kept")) == 4


def test_session_on_another_alias_may_be_closed(guarded: GuardedThread) -> None:
    def closes(guarded: GuardedThread) -> None:
        writes(guarded)
        guarded.second_alias.close()

    assert guarded.in_autocommit(closes) is None
    assert guarded.in_autocommit(closes) is None
    assert len(guarded.effects("kept")) == 2


def test_session_that_a_failed_handler_has_opened_is_not_trusted(guarded: GuardedThread) -> None:
    def fails(guarded: GuardedThread) -> None:
        writes(guarded)
        raise ValueError("no such flight")

    assert guarded.in_autocommit(fails) is None
    assert guarded.do(lambda: guarded.second_alias.connection) is None

    assert guarded.in_autocommit(writes) is None
    session = guarded.do(lambda: guarded.second_alias.connection)
    assert guarded.in_autocommit(fails) is None
    assert guarded.do(lambda: guarded.second_alias.connection) is session, "this one was there before"
    assert len(guarded.effects("kept")) == 3


def test_error_on_another_alias_costs_nothing(guarded: GuardedThread) -> None:
    def meets_an_error(guarded: GuardedThread) -> None:
        writes(guarded)
        with suppress(Error):
            guarded.run("SELECT * FROM no_such_table", guarded.elsewhere)

    session = guarded.do(lambda: (guarded.run("SELECT 1", guarded.elsewhere), guarded.second_alias.connection)[1])

    assert guarded.in_autocommit(meets_an_error) is None
    assert guarded.in_autocommit(writes) is None
    assert guarded.do(lambda: (guarded.second_alias.connection, guarded.second_alias.errors_occurred)) == (
        session,
        False,
    )


# -- sessions that die -------------------------------------------------------------------------------------------------


def kill(guarded: GuardedThread, session: int) -> None:
    """End a session on the server, and wait until it has ended."""
    if guarded.vendor == "postgresql":
        guarded.server.run("SELECT pg_terminate_backend(%s, 10000)", session)
    else:
        guarded.server.run(f"KILL {session}")


def number_of_its_session(guarded: GuardedThread) -> int:
    """The server's number of the session on the other alias of the thread that asks."""
    query = "SELECT pg_backend_pid()" if guarded.vendor == "postgresql" else "SELECT @@SPID"
    return int(guarded.run(query, guarded.elsewhere)[0][0])


def test_session_that_died_under_a_handler_fails_no_other_message(guarded: GuardedThread) -> None:
    def is_killed(guarded: GuardedThread) -> None:
        kill(guarded, number_of_its_session(guarded))
        guarded.write("abuse", guarded.elsewhere)

    def swallows_it(guarded: GuardedThread) -> None:
        with suppress(Error):
            is_killed(guarded)

    for handler in (is_killed, swallows_it):
        assert guarded.in_autocommit(handler) is None, "no work was lost without an error in the handler"
        assert isinstance(guarded.failed, Error) is (handler is is_killed)
        assert guarded.in_autocommit(writes) is None
        assert guarded.failed is None, repr(guarded.failed)
    guarded.works()


def test_session_that_died_between_two_messages_fails_none(guarded: GuardedThread) -> None:
    if guarded.vendor != "postgresql":
        pytest.skip("the drivers of SQL Server do not tell before the next statement")
    for _ in range(3):
        kill(guarded, guarded.do(lambda: number_of_its_session(guarded)))

        assert guarded.in_autocommit(writes) is None
        assert guarded.failed is None, repr(guarded.failed)
    guarded.works()


def test_session_left_in_use_by_whomever_is_closed_before_the_next_handler(guarded: GuardedThread) -> None:
    guarded.do(lambda: leaves_an_atomic_block_open(guarded))

    assert guarded.in_autocommit(writes) is None
    assert guarded.failed is None
    assert guarded.effects("abuse") == []
    assert len(guarded.effects("kept")) == 1


# -- a database that is no home of queues ------------------------------------------------------------------------------


@pytest.fixture
def ledger(guarded: GuardedThread, tmp_path: Path) -> Iterator[str]:
    """An alias of the task's thread on SQLite, with one table."""
    with sqlite3.connect(tmp_path / "ledger") as file:
        file.execute("CREATE TABLE entry (name text)")
    settings = connections.settings["default"] | {"NAME": str(tmp_path / "ledger"), "OPTIONS": {}}

    def connect() -> None:
        connections["ledger"] = sqlite.DatabaseWrapper(settings, "ledger")

    guarded.do(connect)
    yield "ledger"
    guarded.do(lambda: connections["ledger"].close())


def test_alias_on_another_kind_of_database_is_judged_by_what_django_believes(
    guarded: GuardedThread, ledger: str
) -> None:
    def leaves_a_block_open(guarded: GuardedThread) -> None:
        transaction.atomic(using=ledger).__enter__()
        guarded.run("INSERT INTO entry VALUES ('abuse')", ledger)

    def writes_there(guarded: GuardedThread) -> None:
        with suppress(Error):
            guarded.run("SELECT * FROM no_such_table", ledger)
        guarded.run("INSERT INTO entry VALUES ('kept')", ledger)

    state = guarded.in_autocommit(leaves_a_block_open)
    assert state is not None
    assert repr(ledger) in str(state)
    for _ in range(2):
        assert guarded.in_autocommit(writes_there) is None
        assert guarded.failed is None

    assert guarded.do(lambda: guarded.run("SELECT name FROM entry", ledger)) == [("kept",), ("kept",)]
