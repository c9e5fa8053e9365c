"""Which statements leave something on their session that outlives their transaction, going by their text."""

from __future__ import annotations

from typing import Any

import pytest

from queueapp.sql.postgresql.backend import PostgresqlBackend
from queueapp.sql.sqlserver.backend import SqlServerBackend

POSTGRESQL = [
    "SET search_path = nowhere",
    "set role none",
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
    "RESET ROLE",
    "reset session authorization",
    "SELECT 1; RESET ALL",
    "RESET/* what a project had set */ROLE",
    "DO $$ BEGIN RESET ROLE; END $$",
    "DO $$ BEGIN EXECUTE 'RESET ROLE'; END $$",
    "DO $$ BEGIN EXECUTE format('SET search_path = %I', 'a'); END $$",
    "SELECT set_config('a.b', 'true', 'off')",
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
    "SELECT set_config('a.b', 'c', 'on')",
    "DO $$ BEGIN EXECUTE 'SET LOCAL a.b = 1'; END $$",
]
SQL_SERVER = [
    "SET ROWCOUNT 1",
    "SELECT 1\nSET LOCK_TIMEOUT 1",
    "set transaction  isolation level serializable",
    "SET ANSI_NULLS OFF",
    "SET IMPLICIT_TRANSACTIONS ON",
    "USE other",
    "SELECT 1; USE other",
    "EXECUTE AS USER = 'another_user'",
    "CREATE TABLE #t (id int)",
    "SELECT 1 AS a INTO #t",
    "EXEC sp_set_session_context N'a', 1",
    "EXEC sp_getapplock @Resource = 'a', @LockMode = 'Exclusive', @LockOwner = 'Session'",
    "EXEC sp_getapplock N'a', N'Exclusive', N'session'",
    "EXEC sp_getapplock @Resource = %s, @LockMode = 'Exclusive', @LockOwner = %s",
    "EXEC [sys].[sp_getapplock] 'a', 'Exclusive', 'Session'",
    "CREATE TABLE [#t] (id int)",
    'SELECT 1 AS a INTO "#t"',
    "SELECT 1 AS a INTO tempdb..#t",
    "SELECT 1 AS a INTO/**/#t",
    "CREATE PROCEDURE #p AS SELECT 1",
    "SELECT 'it''s' SET ROWCOUNT 1",
    "SELECT 1 -- SET\nSET ROWCOUNT 1",
    "SELECT 1\nUSE other",
    "/* by a library */ REVERT",
]
NOT_SQL_SERVER = [
    "SELECT 1",
    "UPDATE a SET rowcounts = 1, language = 2",
    "SET NOCOUNT ON; INSERT INTO a (b) VALUES (1)",
    "SET IDENTITY_INSERT [a] ON; INSERT INTO [a] (b) VALUES (1); SET IDENTITY_INSERT [a] OFF",
    "DECLARE @a int; SET @a = 1",
    "EXEC sp_getapplock @Resource = 'a', @LockMode = 'Exclusive'",
    "EXEC as_usual",
    "INSERT INTO a (b) VALUES (N'SET ROWCOUNT 1; USE other; it''s CREATE TABLE #t')",
    "SELECT 1 -- SET ROWCOUNT 1",
    "SELECT 1 /* SET ROWCOUNT 1;\nUSE other */",
    "SELECT [SET ROWCOUNT] FROM [a;USE b]",
    'SELECT "SET LANGUAGE x" FROM a',
    "EXEC sp_getapplock @Resource = 'A Session', @LockMode = 'Exclusive', @LockOwner = 'Transaction'",
    "SELECT 'cut; SET ROWCOUNT 1",
    "SELECT 1 FROM a OPTION\n(USE HINT ('RECOMPILE'))",
    "INSERT INTO a SELECT * FROM b WHERE c = 'sp_set_session_context'",
]
#: A statement of PostgreSQL and what its parameters are.
LOCAL = [
    ("SELECT set_config('a.b', %s, %s)", ["c", True]),
    ("SELECT set_config(%s, %s, %s)", ("a.b", "off", "on")),
    ("SELECT set_config(%(name)s, %(value)s, %(local)s)", {"name": "a.b", "value": "c", "local": True}),
    ("SELECT '%%s', set_config('a.b', 'c', is_local => %s::boolean), %s", [True, False]),
    ("SELECT set_config('a.b', %s, true)", [False]),
]
NOT_LOCAL = [
    ("SELECT set_config('a.b', %s, %s)", ["c", False]),
    ("SELECT set_config('a.b', %s, %s)", [True, False]),
    ("SELECT set_config('a.b', %s, %s)", ["true", None]),
    ("SELECT set_config('a.b', %s, %s)", ["true"]),
    ("SELECT set_config(%(name)s, %(local)s, %(value)s)", {"name": "a.b", "value": "c", "local": True}),
    ("SELECT '%%s', set_config('a.b', 'c', %s), %s", [False, True]),
    ("SELECT set_config('a.b', 'c', %s), set_config('a.b', 'c', %s)", [True, False]),
    ("SELECT set_config('a.b', 'c', %s)", iter([True])),
    ("RESET ROLE", [True]),
]


@pytest.mark.parametrize("sql", POSTGRESQL)
def test_statement_that_outlives_its_transaction_on_postgresql(sql: str) -> None:
    assert PostgresqlBackend().sessions.changes_session(sql)


@pytest.mark.parametrize("sql", NOT_POSTGRESQL)
def test_statement_that_ends_with_its_transaction_on_postgresql(sql: str) -> None:
    assert not PostgresqlBackend().sessions.changes_session(sql)


@pytest.mark.parametrize("sql", SQL_SERVER)
def test_statement_that_outlives_its_transaction_on_sql_server(sql: str) -> None:
    assert SqlServerBackend().sessions.changes_session(sql)


@pytest.mark.parametrize("sql", NOT_SQL_SERVER)
def test_statement_that_ends_with_its_transaction_on_sql_server(sql: str) -> None:
    assert not SqlServerBackend().sessions.changes_session(sql)


@pytest.mark.parametrize(("sql", "params"), LOCAL)
def test_set_config_is_what_its_parameter_states(sql: str, params: Any) -> None:
    assert not PostgresqlBackend().sessions.changes_session(sql, params)


@pytest.mark.parametrize(("sql", "params"), NOT_LOCAL)
def test_set_config_for_good_by_its_parameter(sql: str, params: Any) -> None:
    assert PostgresqlBackend().sessions.changes_session(sql, params)


@pytest.mark.parametrize("sql", SQL_SERVER)
def test_each_on_sql_server_is_found_behind_a_long_one(sql: str) -> None:
    text = f"SELECT {', '.join(['1'] * 1000)}\n{sql}"

    assert SqlServerBackend().sessions.may_be_multiple(text)
    assert SqlServerBackend().sessions.changes_session(text)
