"""Which statements leave something on their session that outlives their transaction, going by their text."""

from __future__ import annotations

import pytest

from queueapp.sql.postgresql.backend import PostgresqlBackend
from queueapp.sql.sqlserver.backend import SqlServerBackend

POSTGRESQL = [
    "SET search_path = nowhere",
    "set role nobody",
    "  SET\nstatement_timeout = 1",
    "SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY",
    "SET LOCAL work_mem = '1MB'; SET work_mem = '1MB'",
    "/* by a library */ SET a.b = 'c'",
    "-- by hand\n-- twice\nRESET ALL",
    "DISCARD ALL",
    "LISTEN here",
    "PREPARE one AS SELECT 1",
    "DEALLOCATE ALL",
    "CREATE TEMP TABLE t (id int)",
    "CREATE LOCAL TEMPORARY TABLE t AS SELECT 1",
    "SELECT 1 INTO TEMP t",
    "DECLARE c CURSOR WITH HOLD FOR SELECT 1",
    "SELECT set_config('a.b', 'c', false)",
    "SELECT set_config('a.b', %s, %s)",
    "SELECT set_config('a.b', 'c', false), set_config('a.b', 'c', true)",
    "SELECT pg_advisory_lock(1)",
    "SELECT pg_try_advisory_lock_shared(1)",
]
NOT_POSTGRESQL = [
    "SELECT 1",
    'UPDATE "a" SET "b" = 1',
    "UPDATE a\nSET b = 1",
    "INSERT INTO a (b) VALUES (1) ON CONFLICT (b) DO UPDATE SET c = 2",
    "SET LOCAL statement_timeout = 1",
    "set  local a.b = 'c'; UPDATE a SET b = 1",
    "SET CONSTRAINTS ALL IMMEDIATE",
    "SET TRANSACTION ISOLATION LEVEL SERIALIZABLE",
    "PREPARE TRANSACTION 'one'",
    "CREATE TEMP TABLE t (id int) ON COMMIT DROP",
    "DECLARE c CURSOR FOR SELECT 1",
    "SELECT set_config('a.b', 'c', true)",
    "SELECT pg_advisory_xact_lock(1)",
    "SELECT 'reset', listen FROM template",
]
SQL_SERVER = [
    "SET ROWCOUNT 1",
    "SELECT 1\nSET LOCK_TIMEOUT 1",
    "set transaction  isolation level serializable",
    "SET ANSI_NULLS OFF",
    "SET IMPLICIT_TRANSACTIONS ON",
    "USE other",
    "SELECT 1; USE other",
    "EXECUTE AS USER = 'somebody'",
    "CREATE TABLE #t (id int)",
    "SELECT 1 AS a INTO #t",
    "EXEC sp_set_session_context N'a', 1",
    "EXEC sp_getapplock @Resource = 'a', @LockMode = 'Exclusive', @LockOwner = 'Session'",
]
NOT_SQL_SERVER = [
    "SELECT 1",
    "UPDATE a SET rowcounts = 1, language = 2",
    "SET NOCOUNT ON; INSERT INTO a (b) VALUES (1)",
    "SET IDENTITY_INSERT [a] ON; INSERT INTO [a] (b) VALUES (1); SET IDENTITY_INSERT [a] OFF",
    "DECLARE @a int; SET @a = 1",
    "EXEC sp_getapplock @Resource = 'a', @LockMode = 'Exclusive'",
    "EXEC as_usual",
]


@pytest.mark.parametrize("sql", POSTGRESQL)
def test_statement_that_outlives_its_transaction_on_postgresql(sql: str) -> None:
    assert PostgresqlBackend().changes_session(sql)


@pytest.mark.parametrize("sql", NOT_POSTGRESQL)
def test_statement_that_ends_with_its_transaction_on_postgresql(sql: str) -> None:
    assert not PostgresqlBackend().changes_session(sql)


@pytest.mark.parametrize("sql", SQL_SERVER)
def test_statement_that_outlives_its_transaction_on_sql_server(sql: str) -> None:
    assert SqlServerBackend().changes_session(sql)


@pytest.mark.parametrize("sql", NOT_SQL_SERVER)
def test_statement_that_ends_with_its_transaction_on_sql_server(sql: str) -> None:
    assert not SqlServerBackend().changes_session(sql)
