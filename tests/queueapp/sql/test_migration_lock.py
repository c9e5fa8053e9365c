"""The lock under which migrations run: one at a time, freed when they are over and not when a pool forgets the
session."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
from django.core.management import CommandError
from django.db import OperationalError
from sqlglot import exp

from queueapp.operations import migrating
from queueapp.sql import backend_of
from queueapp.sql.base import Backend
from queueapp.sql.sqlserver.backend import SqlServerBackend
from tests.queueapp.sql.server import Server
from tests.queueapp.sql.tsql import Recorder, never_connected, parsed, placeholders


class Migration:
    def __init__(self, name: str) -> None:
        self.app_label, self.name = "queueapp", name


DONE, NEW = Migration("0001_initial"), Migration("0999_new")


@contextmanager
def waiting(server: Server) -> Iterator[threading.Event]:
    """Another session that waits for the lock in the block; the event is set when it has it."""
    second_session, has_it = server.another(), threading.Event()

    def migrate() -> None:
        server.backend.schema.lock_migrations(second_session)
        has_it.set()
        server.backend.schema.unlock_migrations(second_session)

    thread = threading.Thread(target=migrate)
    thread.start()
    try:
        yield has_it
    finally:
        thread.join(60)
    assert not thread.is_alive()


def test_second_waits_until_the_first_is_done_and_not_until_its_session_ends(server: Server) -> None:
    first = server.another()
    server.backend.schema.lock_migrations(first)

    with waiting(server) as has_it:
        assert not has_it.wait(1.5), "two of them have it"
        server.backend.schema.unlock_migrations(first)
        assert has_it.wait(60), "the session is still open, and has the lock"


def test_lock_is_free_after_the_last_signal_while_its_session_lives_on(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan: migrating.Plan = [(NEW, False)]
    for _ in range(2):  # each app sends one
        migrating.before_migrate(using=server.alias, plan=plan)
    with waiting(server) as has_it:
        migrating.unlock(sender="an app before the last one", using=server.alias, plan=plan)
        assert not has_it.wait(0.5)
        # As a pool does it: closed for Django, open for the server.
        kept: list[Any] = []
        monkeypatch.setattr(type(server.connection), "close", lambda self: kept.append(self))
        migrating.unlock(sender=migrating.last_app(), using=server.alias, plan=plan)
        monkeypatch.undo()
        try:
            assert has_it.wait(60), "the session is still open, and has the lock"
        finally:
            for item in kept:
                item.close()


def test_run_after_a_failed_one_of_the_same_process_has_the_lock_and_frees_it(server: Server) -> None:
    failed: migrating.Plan = [(NEW, False)]
    migrating.before_migrate(using=server.alias, plan=failed)
    with waiting(server) as has_it:
        again: migrating.Plan = [(NEW, False)]
        migrating.before_migrate(using=server.alias, plan=again)
        assert not has_it.wait(0.5)
        migrating.unlock(sender=migrating.last_app(), using=server.alias, plan=again)
        assert has_it.wait(60)


@pytest.mark.parametrize(
    ("plan", "refused"),
    [([], False), ([(NEW, False)], False), ([(DONE, False)], True), ([(DONE, True)], False), ([(NEW, True)], True)],
    ids=["empty", "to be done", "done meanwhile", "to be undone", "undone meanwhile"],
)
def test_plan_that_another_process_has_carried_out_meanwhile_is_refused(
    server: Server, plan: migrating.Plan, refused: bool
) -> None:
    try:
        with pytest.raises(CommandError, match="Run migrate again") if refused else nullcontext():
            migrating.before_migrate(using=server.alias, plan=plan)
    finally:
        migrating.unlock(sender=migrating.last_app(), using=server.alias, plan=plan)


# -- SQL Server, without one -------------------------------------------------------------------------------------------


def asked(*answers: int) -> Recorder:
    recorder = Recorder(answers=[[(answer,)] for answer in answers])
    connection = never_connected(recorder)
    backend: Backend = backend_of(connection)
    assert isinstance(backend, SqlServerBackend)
    backend.schema.lock_migrations(connection)
    return recorder


@pytest.mark.parametrize("granted", [0, 1], ids=["at once", "after a wait"])
def test_procedure_is_asked_until_it_grants_the_lock(granted: int) -> None:
    recorder = asked(-1, -1, granted)

    assert len(recorder.statements) == 3
    for statement in recorder.statements:
        found = parsed(statement.sql)
        assert [type(item) for item in found] == [exp.Set, exp.Declare, exp.Execute, exp.Select]
        assert placeholders(found) == len(statement.params) == 1


@pytest.mark.parametrize("refused", [-2, -3, -999], ids=["cancelled", "deadlock victim", "wrong parameter"])
def test_refusal_of_the_procedure_is_an_error(refused: int) -> None:
    with pytest.raises(OperationalError, match=f"sp_getapplock said {refused}"):
        asked(-1, refused)
