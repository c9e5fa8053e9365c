"""The T-SQL that asks what a user may do, and that waits for locks no longer than a look is worth: a parser reads
it."""

from __future__ import annotations

from typing import Any

from sqlglot import exp

from queueapp.sql.sqlserver.backend import SqlServerBackend
from queueapp.sql.sqlserver.statements import execute
from queueapp.sql.tables import QueueTable
from tests.queueapp.sql.test_tsql_parses import kinds, statements_of
from tests.queueapp.sql.tsql import placeholders
from tests.testapp.models import Leased

TABLE = QueueTable.of(Leased)
_backend = SqlServerBackend()


def test_what_is_lacking_is_asked_of_the_catalog() -> None:
    ((sent, found),) = statements_of(
        TABLE, lambda s, c, _: _backend.schema.missing_privileges(c, "shop].[or'ders", ["SELECT", "DELETE"])
    )
    assert kinds(found) == [exp.Select]
    assert placeholders(found) == len(sent.params) == 5
    assert sent.params == ("SELECT", "DELETE", *["[shop].[or'ders]"] * 3)


def test_a_database_that_cannot_be_written_to_is_known_by_the_catalog() -> None:
    ((_, found),) = statements_of(TABLE, lambda s, c, _: _backend.schema.read_only(c))
    assert kinds(found) == [exp.Select]


def test_the_health_of_a_database_is_asked_of_its_views() -> None:
    health = _backend.health
    ((sent, found),) = statements_of(TABLE, lambda s, c, _: health.snapshot_holders(c, 5))
    assert (kinds(found), sent.params) == ([exp.Select], (5,))
    ((sent, found),) = statements_of(TABLE, lambda s, c, _: health.tables(c, ["shop].[or'ders", "50%"]))
    assert kinds(found) == [exp.Select]
    assert sent.params == (
        '[{"name": "shop].[or\'ders", "quoted": "[shop].[or\'ders]"}, {"name": "50%", "quoted": "[50%]"}]',
    )

    def facts(_s: object, c: object, recorder: Any) -> None:
        recorder.answers.append([("16.0", True, "ON", "FULL")])
        assert ("READ_COMMITTED_SNAPSHOT", "on") in health.facts(c)

    ((_, found),) = statements_of(TABLE, facts)
    assert kinds(found) == [exp.Select]


def _waiting(ms: int) -> str:
    return f"DECLARE @before int = @@LOCK_TIMEOUT; SET LOCK_TIMEOUT {ms}; SELECT @before"


def test_a_lock_is_waited_for_no_longer_and_the_session_is_as_before() -> None:
    def look(_s: object, c: object, recorder: Any) -> None:
        recorder.answers.append([(1500,)])
        with _backend.sessions.lock_timeout(c, 5):
            pass

    assert [sent.sql for sent, _ in statements_of(TABLE, look)] == [_waiting(5), _waiting(1500)]


def test_a_lock_timeout_is_reset_while_a_rollback_is_due() -> None:
    """Django's cursor refuses every statement then, and the timeout would stay for the session."""

    def look(_s: object, c: Any, recorder: Any) -> None:
        recorder.answers.append([(-1,)])
        with _backend.sessions.lock_timeout(c, 5):
            c.in_atomic_block = c.needs_rollback = True

    assert [sent.sql for sent, _ in statements_of(TABLE, look)] == [_waiting(5), _waiting(-1)]


def test_a_limited_wait_without_parameters_is_a_batch_whose_settings_end_with_it() -> None:
    ((sent, _),) = statements_of(TABLE, lambda s, c, _: s.maintenance.is_empty(c))
    assert sent.params == (0,)


def test_a_statement_without_parameters_leaves_nocount_as_it_was() -> None:
    """Without parameters a SET holds for the session, and the ORM's next ``rowcount`` would be -1."""
    ((sent, _),) = statements_of(TABLE, lambda s, c, _: execute(c, "DELETE FROM [t]", ()))
    assert sent.sql == "DELETE FROM [t]; SELECT @@ROWCOUNT"
    ((sent, _),) = statements_of(TABLE, lambda s, c, _: execute(c, "DELETE FROM [t] WHERE [a] = %s", (1,)))
    assert sent.sql.startswith("SET NOCOUNT ON; ")
