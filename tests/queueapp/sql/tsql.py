"""A SQL Server connection of Django that records what reaches the driver, and a parser's verdict on it.

The recording starts at the driver: Django's cursor and mssql-django's are the real ones, so placeholders and ``%`` are
what the server would get. Nothing is executed, and no answer stands for a database's: answers only let a verb go on to
its next statement.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import sqlglot
from django.db import connections
from sqlglot import exp
from sqlglot.errors import ErrorLevel

from tests import odbc


@dataclass
class Statement:
    """One statement as the driver got it."""

    sql: str
    params: tuple[Any, ...]
    sizes: list[tuple[int, int, int]]

    def __str__(self) -> str:
        return self.sql


@dataclass
class Recorder:
    """The driver: keeps every statement, and answers fetches with what was laid down."""

    statements: list[Statement] = field(default_factory=list)
    answers: list[list[tuple[Any, ...]]] = field(default_factory=list)

    def cursor(self) -> _Cursor:
        return _Cursor(self)


class _Cursor:
    rowcount = -1

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._sizes: list[tuple[int, int, int]] = []
        self._rows: list[tuple[Any, ...]] = []
        self.description: Any = None

    def setinputsizes(self, sizes: list[tuple[int, int, int]]) -> None:
        self._sizes = sizes

    def execute(self, sql: str, params: tuple[Any, ...] = ()) -> None:
        self._recorder.statements.append(Statement(sql, tuple(params), self._sizes))
        self._rows = self._recorder.answers.pop(0) if self._recorder.answers else []
        counted = sql.endswith(("SELECT @@ROWCOUNT", "SELECT @done", "SELECT @got", "SELECT @before"))
        self._rows = self._rows or ([(0,)] if counted else [])
        self.description = [("column", None)]

    def fetchall(self) -> list[tuple[Any, ...]]:
        return self._rows

    def fetchone(self) -> tuple[Any, ...] | None:
        return self._rows.pop(0) if self._rows else None

    def fetchmany(self, count: int) -> list[tuple[Any, ...]]:
        rows, self._rows = self._rows[:count], self._rows[count:]
        return rows

    def nextset(self) -> bool:
        return False

    def close(self) -> None:
        pass


def never_connected(recorder: Recorder) -> Any:
    """Django's connection to a SQL Server 2022 that is not there."""
    odbc.required()
    backend = pytest.importorskip("mssql.base", exc_type=ImportError)
    settings = connections.settings["default"] | {"ENGINE": "mssql", "NAME": "shop", "OPTIONS": {}}
    connection = backend.DatabaseWrapper(settings, "recorded")
    backend.DatabaseWrapper._known_versions["recorded"] = 2022
    backend.DatabaseWrapper._known_azures["recorded"] = False
    connection.connection = recorder
    connection.ensure_connection = lambda: None
    connection.Database = SimpleNamespace(**{name: type(name, (Exception,), {}) for name in _ERRORS})
    return connection


_ERRORS = (
    "DataError", "OperationalError", "IntegrityError", "InternalError", "ProgrammingError", "NotSupportedError",
    "DatabaseError", "InterfaceError", "Error",
)  # fmt: skip

# -- the parser's verdict ----------------------------------------------------------------------------------------------

#: sqlglot has no TRY … CATCH, no IF and no BEGIN TRANSACTION among statements: the frames of ``fetch_within`` are
#: checked as text, letter by letter, and what stands in them is parsed.
_TRY = re.compile(
    r"^(?P<first>IF @@TRANCOUNT > 0 ROLLBACK TRANSACTION; BEGIN TRANSACTION; |DECLARE @scope bigint = \?; )?"
    r"SET LOCK_TIMEOUT \d+; "
    r"BEGIN TRY (?P<body>.*); END TRY BEGIN CATCH SET LOCK_TIMEOUT -1; "
    r"IF ERROR_NUMBER\(\) <> 1222 BEGIN; THROW; END; SELECT 1222 AS \[lock_timeout\]; END CATCH; SET LOCK_TIMEOUT -1$"
)


#: Nor has it WHILE: the batch that takes application locks by name is checked letter by letter.
_LOCK_NAMES = re.compile(
    r"^SET NOCOUNT ON; DECLARE @got int = 0, @name nvarchar\(255\), @n int = 0, @path nvarchar\(20\), @names "
    r"nvarchar\(max\) = \?; "
    r"SET @name = JSON_VALUE\(@names, '\$\[0\]'\); WHILE @name IS NOT NULL AND @got >= 0 BEGIN "
    r"EXEC @got = sp_getapplock @Resource = @name, @LockMode = 'Exclusive', @LockOwner = 'Transaction', "
    r"@LockTimeout = -1; SET @n = @n \+ 1; SET @path = CONCAT\('\$\[', @n, '\]'\); "
    r"SET @name = JSON_VALUE\(@names, @path\); END; SELECT @got$"
)

#: The batch that inserts under an application lock, in a transaction of its own if there is none.
_INSERT_LOCKED = re.compile(
    r"^SET NOCOUNT ON; DECLARE @own bit = CASE WHEN @@TRANCOUNT = 0 THEN 1 ELSE 0 END; DECLARE @held int, @done int; "
    r"BEGIN TRY IF @own = 1 BEGIN TRANSACTION; "
    r"EXEC @held = sp_getapplock @Resource = \?, @LockMode = 'Exclusive', @LockOwner = 'Transaction', "
    r"@LockTimeout = -1; "
    r"IF @held = -3 THROW 51205, '[\w .]+', 1; IF @held < 0 THROW 51000, '[\w .]+', 1; "
    r"(?P<insert>INSERT INTO .*); SET @done = @@ROWCOUNT; IF @own = 1 COMMIT TRANSACTION; END TRY "
    r"BEGIN CATCH IF @own = 1 AND @@TRANCOUNT > 0 ROLLBACK TRANSACTION; THROW; END CATCH; SELECT @done$"
)

#: The batch of a claim whose keys take turns: the loop over the keys letter by letter, its statements are parsed.
_TAKE_TURNS = re.compile(
    r"^SET NOCOUNT ON; DECLARE @last nvarchar\(200\) = \?, @left bigint = \?, @wanted bigint = \?, "
    r"@limit bigint = \?, @low bigint = \?, @ranges varchar\(max\) = \?, "
    r"@now datetime2\(6\) = SYSUTCDATETIME\(\), @key nvarchar\(200\), "
    r"@first nvarchar\(200\), @looked int = 0, @used bigint = 0, @units bigint, @room bigint, @rounds bigint, "
    r"@held_back bigint; "
    r"DECLARE @keys TABLE \(\[n\] int IDENTITY PRIMARY KEY, \[key\] nvarchar\(200\), \[room\] bigint, "
    r"\[units\] bigint\); "
    r"(DECLARE @taken TABLE \(\[key\] nvarchar\(200\)\); )?"
    r"WHILE @looked < \d+ AND @used < @wanted BEGIN "
    r"IF @looked = 0 AND @left > 0 SELECT @key = @last, @units = @left; "
    r"ELSE BEGIN SET @key = NULL; (?P<following>SELECT [^;]*); "
    r"IF @key IS NULL (?P<first>SELECT [^;]*); SET @units = (?P<weight>[^;]*); END; "
    r"IF @key IS NULL OR @key = @first BREAK; SET @first = COALESCE\(@first, @key\); (?P<room>SELECT @room = [^;]*); "
    r"IF @room > 0 BEGIN IF @units > @room SET @units = @room; "
    r"INSERT INTO @keys \(\[key\], \[room\], \[units\]\) VALUES \(@key, @room, @units\); "
    r"SET @used = @used \+ @units; END; "
    r"IF @looked = 0 AND @left > 0 AND @room = 0 SET @first = NULL; "
    r"IF @room < 0 AND \(@held_back IS NULL OR @room > @held_back\) SET @held_back = @room; "
    r"SET @last = @key; SET @looked = @looked \+ 1; END; "
    r"SET @rounds = @limit / CASE WHEN @used = 0 THEN 1 ELSE @used END; IF @rounds = 0 SET @rounds = 1; "
    r"(?P<update>UPDATE q SET [^;]*?)( OUTPUT inserted\.\[\w+\] INTO @taken \(\[key\]\))?(?P<output> OUTPUT [^;]*); "
    r"(?P<spent>UPDATE r SET [^;]*; INSERT INTO [^;]*; )?SELECT @last, @used, @held_back$"
)

#: sqlglot has no ALTER INDEX either: letter by letter, too.
_ALTER_INDEX = re.compile(
    r"^ALTER INDEX ALL ON (\[([^\]]|\]\])+\])(\.\[([^\]]|\]\])+\])? "
    r"(SET \(OPTIMIZE_FOR_SEQUENTIAL_KEY = (ON|OFF)\)"
    r"|REBUILD WITH \(FILLFACTOR = 100(, OPTIMIZE_FOR_SEQUENTIAL_KEY = ON)?\))$"
)


def alters_index(sql: str) -> bool:
    """Whether this is one of our changes of index options, which the parser does not know."""
    return _ALTER_INDEX.match(sql) is not None


def parsed(sql: str) -> list[Any]:
    """The statements of a batch. Fails on anything that the parser does not understand completely."""
    if _LOCK_NAMES.match(sql):
        return parsed("SELECT ?")
    if locked := _INSERT_LOCKED.match(sql):
        return parsed(f"SELECT ?; {locked['insert']}")
    if turns := _TAKE_TURNS.match(sql):
        parts = {name: text or "" for name, text in turns.groupdict().items()}
        return parsed(
            "SELECT ?, ?, ?, ?, ?, ?; {following}; {first}; SELECT {weight}; {room}; {update}{output}; "
            "{spent}SELECT 1".format(**parts)
        )
    framed = _TRY.match(sql)
    if framed:
        scope = "SELECT ?; " if "?" in (framed["first"] or "") else ""
        return parsed(scope + framed["body"])
    found = sqlglot.parse(sql, dialect="tsql", error_level=ErrorLevel.RAISE)
    assert found, sql
    for item in found:
        assert item is not None, sql
        assert not isinstance(item, exp.Command), f"not understood: {sql}"
        assert next(item.find_all(exp.Command), None) is None, f"not understood in part: {sql}"
    # On an absent key it locks the range up to the next one: writers of different keys wait for each other, and
    # deadlock.
    assert not any({"HOLDLOCK", "SERIALIZABLE"} & given for _, given in hints(found)), f"may lock a range: {sql}"
    return [candidate for candidate in found if candidate is not None]


def placeholders(found: list[exp.Expression]) -> int:
    """Parameters of a parsed batch."""
    return sum(1 for item in found for _ in item.find_all(exp.Placeholder))


def tables(found: list[exp.Expression]) -> set[str]:
    """Every name in the place of a table, as it is written."""
    return {
        ".".join(part.name for part in table.parts)
        for item in found
        for table in item.find_all(exp.Table)
        if table.name
    }


def columns(found: list[exp.Expression]) -> set[str]:
    """Every column that is named."""
    return {column.name for item in found for column in item.find_all(exp.Column)} | {
        name.name for item in found if isinstance(item.this, exp.Schema) for name in item.this.expressions
    }


def hints(found: list[exp.Expression]) -> Iterator[tuple[str, set[str]]]:
    """Each table with the hints it is read under."""
    for item in found:
        for table in item.find_all(exp.Table):
            given = {hint.sql("tsql") for with_ in table.args.get("hints") or () for hint in with_.expressions}
            if given:
                yield table.name, given
