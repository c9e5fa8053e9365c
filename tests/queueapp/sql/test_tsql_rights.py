"""The T-SQL that asks what a user may do, and that waits for locks no longer than a look is worth: a parser reads it."""

from __future__ import annotations

from sqlglot import exp

from queueapp.sql.sqlserver.backend import SqlServerBackend
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


def test_a_lock_is_waited_for_no_longer_and_the_session_is_as_before() -> None:
    def look(_s: object, c: object, _: object) -> None:
        with _backend.sessions.lock_timeout(c, 5):
            pass

    before, after = (sent.sql for sent, _ in statements_of(TABLE, look))
    assert "; SET LOCK_TIMEOUT 5;" in before
    assert "; SET LOCK_TIMEOUT -1;" in after
