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
from tests.workers.connections.desk import Desk

Handler = Callable[[Desk], Any]


def leaves_an_atomic_block_open(desk: Desk) -> None:
    transaction.atomic(using=desk.elsewhere).__enter__()
    desk.write("abuse", desk.elsewhere)


def leaves_a_failed_block_open(desk: Desk) -> None:
    transaction.atomic(using=desk.elsewhere).__enter__()
    with suppress(Error):
        desk.run("SELECT * FROM no_such_table", desk.elsewhere)


def turns_autocommit_off(desk: Desk) -> None:
    transaction.set_autocommit(False, using=desk.elsewhere)
    desk.write("abuse", desk.elsewhere)


def turns_autocommit_off_beneath_django(desk: Desk) -> None:
    desk.other.ensure_connection()
    desk.other.connection.autocommit = False
    desk.write("abuse", desk.elsewhere)


def begins_by_itself(desk: Desk) -> None:
    desk.run("BEGIN", desk.elsewhere)
    desk.write("abuse", desk.elsewhere)


def closes_inside_of_a_block(desk: Desk) -> None:
    with transaction.atomic(using=desk.elsewhere):
        desk.write("abuse", desk.elsewhere)
        desk.other.close()


def asked_without_an_error(desk: Desk, handler: Handler) -> None:
    """Skip what is noticed on PostgreSQL only; in the test's own thread, where a skip is one."""
    if handler is begins_by_itself and desk.vendor != "postgresql":
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
def test_work_left_on_another_alias_is_a_failed_attempt_that_names_it(desk: Desk, handler: Handler) -> None:
    asked_without_an_error(desk, handler)
    left = desk.in_autocommit(handler)

    assert left is not None
    assert not left.replaced, "the task's own session has nothing to do with it"
    assert repr(desk.elsewhere) in str(left)
    assert ("closed" in str(left)) is (handler is closes_inside_of_a_block)
    assert desk.effects("abuse") == []
    desk.works()


@pytest.mark.parametrize("handler", ABUSES)
def test_work_left_on_another_alias_takes_the_workers_transaction_with_it(desk: Desk, handler: Handler) -> None:
    asked_without_an_error(desk, handler)
    messages = desk.server.put(Transactional)

    def also_writes(desk: Desk) -> None:
        desk.write("abuse")
        handler(desk)

    left = desk.in_transaction(also_writes)

    assert left is not None
    assert not left.replaced
    assert repr(desk.elsewhere) in str(left)
    assert desk.messages() == messages
    assert desk.effects("abuse") == []
    desk.works()


@pytest.mark.parametrize("handler", ABUSES)
def test_handler_that_raises_as_well_has_its_own_reason(desk: Desk, handler: Handler) -> None:
    asked_without_an_error(desk, handler)

    def raises(desk: Desk) -> None:
        handler(desk)
        raise ValueError("no such flight")

    assert desk.in_autocommit(raises) is None
    assert isinstance(desk.failed, ValueError)
    assert desk.effects("abuse") == []
    desk.works()


def test_own_alias_and_another_are_both_named(desk: Desk) -> None:
    def abuses_both(desk: Desk) -> None:
        leaves_an_atomic_block_open(desk)
        desk.connection.close()

    left = desk.in_autocommit(abuses_both)

    assert left is not None
    assert left.replaced
    assert [alias in reason for alias, reason in zip((desk.alias, desk.elsewhere), left.reasons, strict=True)]
    desk.works()


# -- what a handler may do there ----------------------------------------------------------------------------------------


def writes(desk: Desk) -> None:
    desk.write("kept", desk.elsewhere)


def test_session_on_another_alias_is_kept_from_message_to_message(desk: Desk) -> None:
    sessions = []

    def remembers(desk: Desk) -> None:
        with transaction.atomic(using=desk.elsewhere):
            writes(desk)
        with suppress(KeyError), transaction.atomic(using=desk.elsewhere):
            raise KeyError
        sessions.append(desk.other.connection)

    for _ in range(3):
        assert desk.in_autocommit(remembers) is None
    desk.server.put(Transactional)
    assert desk.in_transaction(remembers) is None

    assert len({id(session) for session in sessions}) == 1
    assert len(desk.effects("kept")) == 4


def test_session_on_another_alias_may_be_closed(desk: Desk) -> None:
    def closes(desk: Desk) -> None:
        writes(desk)
        desk.other.close()

    assert desk.in_autocommit(closes) is None
    assert desk.in_autocommit(closes) is None
    assert len(desk.effects("kept")) == 2


def test_session_that_a_failed_handler_has_opened_is_not_trusted(desk: Desk) -> None:
    def fails(desk: Desk) -> None:
        writes(desk)
        raise ValueError("no such flight")

    assert desk.in_autocommit(fails) is None
    assert desk.do(lambda: desk.other.connection) is None

    assert desk.in_autocommit(writes) is None
    session = desk.do(lambda: desk.other.connection)
    assert desk.in_autocommit(fails) is None
    assert desk.do(lambda: desk.other.connection) is session, "this one was there before"
    assert len(desk.effects("kept")) == 3


def test_error_on_another_alias_costs_nothing(desk: Desk) -> None:
    def meets_an_error(desk: Desk) -> None:
        writes(desk)
        with suppress(Error):
            desk.run("SELECT * FROM no_such_table", desk.elsewhere)

    session = desk.do(lambda: (desk.run("SELECT 1", desk.elsewhere), desk.other.connection)[1])

    assert desk.in_autocommit(meets_an_error) is None
    assert desk.in_autocommit(writes) is None
    assert desk.do(lambda: (desk.other.connection, desk.other.errors_occurred)) == (session, False)


# -- sessions that die ----------------------------------------------------------------------------------------------------


def kill(desk: Desk, session: int) -> None:
    """End a session on the server, and wait until it has ended."""
    if desk.vendor == "postgresql":
        desk.server.run("SELECT pg_terminate_backend(%s, 10000)", session)
    else:
        desk.server.run(f"KILL {session}")


def number_of_its_session(desk: Desk) -> int:
    """The server's number of the session on the other alias of the thread that asks."""
    query = "SELECT pg_backend_pid()" if desk.vendor == "postgresql" else "SELECT @@SPID"
    return int(desk.run(query, desk.elsewhere)[0][0])


def test_session_that_died_under_a_handler_fails_no_other_message(desk: Desk) -> None:
    def is_killed(desk: Desk) -> None:
        kill(desk, number_of_its_session(desk))
        desk.write("abuse", desk.elsewhere)

    def swallows_it(desk: Desk) -> None:
        with suppress(Error):
            is_killed(desk)

    for handler in (is_killed, swallows_it):
        assert desk.in_autocommit(handler) is None, "no work was lost of which the handler was not told"
        assert isinstance(desk.failed, Error) is (handler is is_killed)
        assert desk.in_autocommit(writes) is None
        assert desk.failed is None, repr(desk.failed)
    desk.works()


def test_session_that_died_between_two_messages_fails_none(desk: Desk) -> None:
    if desk.vendor != "postgresql":
        pytest.skip("the drivers of SQL Server do not tell before the next statement")
    for _ in range(3):
        kill(desk, desk.do(lambda: number_of_its_session(desk)))

        assert desk.in_autocommit(writes) is None
        assert desk.failed is None, repr(desk.failed)
    desk.works()


def test_session_left_in_use_by_whomever_is_closed_before_the_next_handler(desk: Desk) -> None:
    desk.do(lambda: leaves_an_atomic_block_open(desk))

    assert desk.in_autocommit(writes) is None
    assert desk.failed is None
    assert desk.effects("abuse") == []
    assert len(desk.effects("kept")) == 1


# -- a database that is no home of queues ----------------------------------------------------------------------------------


@pytest.fixture
def ledger(desk: Desk, tmp_path: Path) -> Iterator[str]:
    """An alias of the task's thread on SQLite, with one table."""
    with sqlite3.connect(tmp_path / "ledger") as file:
        file.execute("CREATE TABLE entry (name text)")
    settings = connections.settings["default"] | {"NAME": str(tmp_path / "ledger"), "OPTIONS": {}}

    def connect() -> None:
        connections["ledger"] = sqlite.DatabaseWrapper(settings, "ledger")

    desk.do(connect)
    yield "ledger"
    desk.do(lambda: connections["ledger"].close())


def test_alias_on_another_kind_of_database_is_judged_by_what_django_believes(desk: Desk, ledger: str) -> None:
    def leaves_a_block_open(desk: Desk) -> None:
        transaction.atomic(using=ledger).__enter__()
        desk.run("INSERT INTO entry VALUES ('abuse')", ledger)

    def writes_there(desk: Desk) -> None:
        with suppress(Error):
            desk.run("SELECT * FROM no_such_table", ledger)
        desk.run("INSERT INTO entry VALUES ('kept')", ledger)

    left = desk.in_autocommit(leaves_a_block_open)
    assert left is not None
    assert repr(ledger) in str(left)
    for _ in range(2):
        assert desk.in_autocommit(writes_there) is None
        assert desk.failed is None

    assert desk.do(lambda: desk.run("SELECT name FROM entry", ledger)) == [("kept",), ("kept",)]
