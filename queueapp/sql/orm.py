"""Statements that Django's ORM builds on tables of messages: non-blocking reads, the parts of a search by what is in a
message, and the parts that the handler of a whole set of messages uses (which messages they are, a field of their
bodies, an INSERT from a SELECT)."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from django.db.models import (
    CharField,
    DecimalField,
    F,
    Func,
    JSONField,
    Lookup,
    Model,
    QuerySet,
    TextField,
    UUIDField,
    Value,
)
from django.db.models.functions import Cast
from django.db.models.sql.datastructures import BaseTable

from .sqlserver.statements import LOOKING, counted_rows, json_of

if TYPE_CHECKING:
    _Lookup = Lookup[Any]
else:
    _Lookup = Lookup  # not generic at run time

M = TypeVar("M", bound=Model)


class _NonblockingTable(BaseTable):
    """The table that a query selects from. An UPDATE or DELETE built of the query names the table itself, without the
    hints."""

    def as_microsoft(self, compiler: Any, connection: Any) -> Any:
        # Index: the query's own. Safe: LOOKING.
        sql, params = self.as_sql(compiler, connection)
        # select_for_update writes hints of its own in the same place.
        return (sql if compiler.query.select_for_update else f"{sql} WITH ({LOOKING})"), params


def nonblocking(rows: QuerySet[M]) -> QuerySet[M]:
    """The same rows, read without waiting for locks and without blocking writers, also after further filters.

    PostgreSQL reads row versions and needs nothing. SQL Server does so where READ_COMMITTED_SNAPSHOT is on; elsewhere a
    plain SELECT waits for each row that an open transaction holds, which is each TRANSACTIONAL handler, and can become
    the victim of a deadlock with a delete. There, rows that another open transaction has changed, inserted or deleted
    are skipped: acceptable for a figure or a page, not for a decision about a message.
    """
    return _with_table(rows, _NonblockingTable)


def _with_table(rows: QuerySet[M], table_class: type[BaseTable]) -> QuerySet[M]:
    found = rows.all()
    query = cast("Any", found.query)
    # On the query itself, so that every clone of it has it, of any class.
    query.base_table_class = table_class
    query.alias_map = {
        alias: table_class(table.table_name, table.table_alias) if type(table) is BaseTable else table
        for alias, table in query.alias_map.items()
    }
    return found


class _SoughtTable(BaseTable):
    """The table of messages that are named by their keys."""

    def as_microsoft(self, compiler: Any, connection: Any) -> Any:
        # Index: that of the keys. A list of keys may be planned as a scan while statistics say that the table is small,
        # and a scan waits for every row that an open transaction holds. Safe: only reads.
        sql, params = self.as_sql(compiler, connection)
        return (sql if compiler.query.select_for_update else f"{sql} WITH (FORCESEEK)"), params


def sought(rows: QuerySet[M], name: str, numbers: Sequence[int]) -> QuerySet[M]:
    """The rows that have one of these numbers in this column, found by its index, one seek a number."""
    return _with_table(rows.filter(Among(name, numbers)), _SoughtTable)


class Among(_Lookup):
    """Whether a number is one of these: one parameter for any count of numbers. (A lookup: SQL Server has no boolean
    values, and Django would compare any other condition with a bit.)"""

    lookup_name = "among"
    prepare_rhs = False

    def __init__(self, name: str, numbers: Sequence[int]) -> None:
        super().__init__(F(name), list(numbers))

    def as_postgresql(self, compiler: Any, connection: Any) -> tuple[str, list[Any]]:
        column, params = self.process_lhs(compiler, connection)
        # Index: that of the column, one seek a number. Safe: only reads.
        return f"{column} = ANY(%s::bigint[])", [*params, self.rhs]

    def as_microsoft(self, compiler: Any, connection: Any) -> tuple[str, list[Any]]:
        column, params = self.process_lhs(compiler, connection)
        # Index: as above, with the hint of ``sought``. One statement text for any count of numbers.
        return f"{column} IN (SELECT CAST([value] AS bigint) FROM OPENJSON(%s))", [*params, str(json_of(self.rhs))]


class ContainsAny(_Lookup):
    """Whether a text contains any of these; upper and lower case of ASCII letters are the same."""

    lookup_name = "contains_any"
    prepare_rhs = False

    def __init__(self, name: str, texts: Sequence[str]) -> None:
        escaped = (text.lower().replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_") for text in texts)
        super().__init__(F(name), [f"%{text}%" for text in escaped])

    def as_postgresql(self, compiler: Any, connection: Any) -> tuple[str, list[Any]]:
        column, params = self.process_lhs(compiler, connection)
        # Index: none, the rows are those of the query. COLLATE: compares bytes, a tenth of the time.
        return f'lower({column} COLLATE "C") LIKE ANY(%s::text[])', [*params, self.rhs]

    def as_microsoft(self, compiler: Any, connection: Any) -> tuple[str, list[Any]]:
        column, params = self.process_lhs(compiler, connection)
        # Index: as above. "[" begins a set of characters, and "\" has no meaning without ESCAPE.
        patterns = [text.replace("[", "\\[") for text in self.rhs]
        like = f"{column} COLLATE Latin1_General_CI_AS LIKE %s ESCAPE '\\'"
        values = [value for pattern in patterns for value in (*params, pattern)]
        return f"({' OR '.join([like] * len(patterns))})", values


class BodyContains(_Lookup):
    """Whether a body contains this text of ASCII characters. (On SQL Server also one that differs in case.)"""

    lookup_name = "body_contains"
    prepare_rhs = False

    def __init__(self, text: str) -> None:
        super().__init__(F("body"), text)

    def as_postgresql(self, compiler: Any, connection: Any) -> tuple[str, list[Any]]:
        body, params = self.process_lhs(compiler, connection)
        # Index: none, the rows are those of the query.
        return f"position(%s::bytea in {body}) > 0", [self.rhs.encode("ascii"), *params]

    def as_microsoft(self, compiler: Any, connection: Any) -> tuple[str, list[Any]]:
        body, params = self.process_lhs(compiler, connection)
        # Index: as above. Bytes become characters of the database's code page; those of ASCII are the same in each.
        return f"CHARINDEX(CONVERT(varchar(8000), %s), CONVERT(varchar(max), {body})) > 0", [self.rhs, *params]


def exist(connection: Any, tables: Sequence[str]) -> list[bool]:
    """Whether the catalog has each of these tables, or a view of that name, in one statement."""
    names = [connection.ops.quote_name(table) for table in tables]
    params: list[Any]
    if connection.vendor == "microsoft":
        # Index: none, the catalog by name.
        sql, params = "SELECT CAST([key] AS int), OBJECT_ID([value]) FROM OPENJSON(%s)", [str(json_of(names))]
    else:
        # Index: that of pg_class by name.
        sql = "SELECT n.k - 1, to_regclass(n.t)::oid FROM unnest(%s::text[]) WITH ORDINALITY AS n(t, k)"
        params = [names]
    with connection.cursor() as cursor:
        cursor.execute(sql, params)
        numbers = {number for number, key in cursor.fetchall() if key is not None}
    return [number in numbers for number in range(len(tables))]


def have_rows(connection: Any, tables: Sequence[str]) -> list[bool]:
    """Whether each of these tables has a row, in one statement."""
    hints = f" WITH ({LOOKING})" if connection.vendor == "microsoft" else ""
    # Index: any, the first row. Safe: a plain read; on SQL Server LOOKING.
    found = [
        f"SELECT {number} WHERE EXISTS (SELECT 1 FROM {connection.ops.quote_name(table)}{hints})"
        for number, table in enumerate(tables)
    ]
    with connection.cursor() as cursor:
        cursor.execute(" UNION ALL ".join(found))
        numbers = {number for (number,) in cursor.fetchall()}
    return [number in numbers for number in range(len(tables))]


def rows_in(connection: Any, tables: Sequence[str]) -> list[bool | None]:
    """Whether each of these tables has a row; None: the catalog does not have the table. Two statements."""
    known = exist(connection, tables)
    there = [table for table, is_there in zip(tables, known, strict=True) if is_there]
    found = iter(have_rows(connection, there) if there else ())
    return [next(found) if is_there else None for is_there in known]


class Scan(NamedTuple):
    """The rows of a slice: how many, the ends of their keys, and of the keys of those that match (None: no row)."""

    rows: int
    low: int | None
    high: int | None
    low_match: int | None
    high_match: int | None


def scan(connection: Any, slices: Sequence[QuerySet[Any]]) -> list[Scan]:
    """What is in these slices, in one statement. Each selects keys of a table, and 1 for a row that matches, else 0; it
    is bounded by its order and a limit."""
    selects, params = [], []
    for number, rows in enumerate(slices):
        inner, values = rows.query.get_compiler(connection=connection).as_sql()
        # Index: the primary key, in its order up to the limit. Safe: the slice is ``nonblocking``.
        selects.append(
            f"SELECT {number}, COUNT(*), MIN(s.k), MAX(s.k), MIN(CASE WHEN s.m = 1 THEN s.k END), "
            f"MAX(CASE WHEN s.m = 1 THEN s.k END) FROM ({inner}) AS s (k, m)"
        )
        params += values
    with connection.cursor() as cursor:
        cursor.execute(" UNION ALL ".join(selects), params)
        return [Scan(*row[1:]) for row in sorted(cursor.fetchall(), key=itemgetter(0))]


class HeaderText(Func):
    """A header of the rows of a queue as text; NULL where there is none. For a generated column."""

    def __init__(self, name: str, max_length: int) -> None:
        super().__init__(F("headers"), output_field=CharField(max_length=max_length))
        self.name, self.max_length = name, max_length

    def as_postgresql(self, compiler: Any, connection: Any, **_: Any) -> tuple[str, list[Any]]:
        headers, params = compiler.compile(self.source_expressions[0])
        # No table is read. ``jsonb``, whose operators are immutable, as a generated column needs.
        return f"({headers}::jsonb ->> '{self.name}')", list(params)

    def as_microsoft(self, compiler: Any, connection: Any, **_: Any) -> tuple[str, list[Any]]:
        headers, params = compiler.compile(self.source_expressions[0])
        # No table is read. Deterministic, as a persisted column needs.
        return f"CAST(JSON_VALUE({headers}, '$.\"{self.name}\"') AS nvarchar({int(self.max_length)}))", list(params)


class HeaderKey(HeaderText):
    """The same, never NULL, so that a message without the header has a key as well, ''; and cut to its length."""

    def as_postgresql(self, compiler: Any, connection: Any, **_: Any) -> tuple[str, list[Any]]:
        text, params = super().as_postgresql(compiler, connection)
        # No table is read. Immutable, as a generated column needs.
        return f"coalesce(left({text}, {int(self.max_length)}), '')", params

    def as_microsoft(self, compiler: Any, connection: Any, **_: Any) -> tuple[str, list[Any]]:
        text, params = super().as_microsoft(compiler, connection)
        # No table is read. Deterministic, as a persisted column needs.
        return f"ISNULL({text}, N'')", params


class _BodyText(Func):
    """The text at a path of a JSON body; NULL where there is none."""

    output_field = TextField()

    def __init__(self, path: Sequence[str | int], *, is_long: bool = False, is_json: bool = False) -> None:
        super().__init__(F("body"))
        self.path, self.is_long, self.is_json = list(path), is_long, is_json

    def as_postgresql(self, compiler: Any, connection: Any, **_: Any) -> tuple[str, list[Any]]:
        body, params = compiler.compile(self.source_expressions[0])
        # ``json``, since a single value is read: ``jsonb`` would be built first.
        return f"(convert_from({body}, 'UTF8')::json #>> %s::text[])", [*params, [str(step) for step in self.path]]

    def as_microsoft(self, compiler: Any, connection: Any, **_: Any) -> tuple[str, list[Any]]:
        body, params = compiler.compile(self.source_expressions[0])
        steps = "".join(f"[{step}]" if isinstance(step, int) else f".{_quoted(step)}" for step in self.path)
        path = f"${steps}".replace("'", "''").replace("%", "%%")
        # XML is the only way from UTF-8 to text on every version. "]]>" would end the CDATA and is written as a JSON
        # escape.
        opening = 'CONVERT(varbinary(max), \'<?xml version="1.0" encoding="UTF-8"?><![CDATA[\')'
        bytes_as_text = f"REPLACE(CONVERT(varchar(max), {body}), ']]>', ']]\\u003E')"
        # U+FFFE and U+FFFF are valid in JSON and not in XML. Without COLLATE, which would convert the bytes to its code
        # page.
        for code, last in (("FFFE", "BE"), ("FFFF", "BF")):
            raw = f"CONVERT(varchar(3), 0xEFBF{last})"
            bytes_as_text = f"REPLACE({bytes_as_text}, {raw}, '\\u{code}')"
        within = f"CONVERT(varbinary(max), {bytes_as_text})"
        text = f"CAST({opening} + {within} + CONVERT(varbinary(max), ']]>') AS xml).value('.', 'nvarchar(max)')"
        if self.is_json:
            # JSON_VALUE is NULL for an object or a list, and JSON_QUERY for everything else.
            return f"COALESCE(JSON_QUERY({text}, '{path}'), JSON_VALUE({text}, '{path}'))", [*params, *params]
        if not self.is_long:
            return f"JSON_VALUE({text}, '{path}')", params  # an aggregate accepts it, and no subquery
        # JSON_VALUE returns NULL for more than 4,000 characters. The body is wrapped into a list: a body that is a list
        # would be as many rows.
        return f"(SELECT j.[v] FROM OPENJSON(N'[' + {text} + N']') WITH ([v] nvarchar(max) '{path}') AS j)", params


def _quoted(name: str) -> str:
    return '"' + name.replace("\\", "\\\\").replace('"', '\\"') + '"'


class _CastNumber(Cast):
    """A JSON number as a decimal. SQL Server knows ``1e5`` as a float only."""

    def as_microsoft(self, compiler: Any, connection: Any, **_: Any) -> tuple[str, list[Any]]:
        number, params = compiler.compile(self.source_expressions[0])
        kind = self.output_field.cast_db_type(connection)
        return f"ISNULL(TRY_CAST({number} AS {kind}), CAST(CAST({number} AS float) AS {kind}))", [*params, *params]


def _stored_uuid(guid: str, field: Any, connection: Any) -> str:
    """A ``uniqueidentifier`` as a column of this field holds it: mssql-django's UUIDField is ``char(32)``, into which
    the server does not convert one, and which would cut text with hyphens off."""
    if field.db_type(connection) == "uniqueidentifier":
        return guid
    text = f"LOWER(CONVERT(char(36), {guid}))"
    return f"REPLACE({text}, '-', '')" if isinstance(field, UUIDField) else text


class _CastUuid(Cast):
    """Text as a UUID."""

    def as_microsoft(self, compiler: Any, connection: Any, **_: Any) -> tuple[str, list[Any]]:
        text, params = compiler.compile(self.source_expressions[0])
        return _stored_uuid(f"CAST({text} AS uniqueidentifier)", self.output_field, connection), list(params)


def body_field(path: Sequence[str | int], output_field: Any) -> Any:
    """A value of a JSON body as a field of this kind."""
    is_json = isinstance(output_field, JSONField)
    text = _BodyText(path, is_long=isinstance(output_field, CharField | TextField), is_json=is_json)
    if isinstance(output_field, TextField):
        return text
    kinds = {DecimalField: _CastNumber, UUIDField: _CastUuid}
    conversion = next((kinds[kind] for kind in kinds if isinstance(output_field, kind)), Cast)
    return conversion(text, output_field)


class NewUuid(Func):
    """A random UUID for a column of this field, another one for each row."""

    def __init__(self, field: Any) -> None:
        super().__init__(output_field=field)

    def as_postgresql(self, compiler: Any, connection: Any, **_: Any) -> tuple[str, list[Any]]:
        random = "gen_random_uuid()"
        if isinstance(self.output_field, UUIDField):
            return random, []
        return f"CAST({random} AS {self.output_field.cast_db_type(connection)})", []

    def as_microsoft(self, compiler: Any, connection: Any, **_: Any) -> tuple[str, list[Any]]:
        return _stored_uuid("NEWID()", self.output_field, connection), []


def insert_select(connection: Any, rows: Any, model: Any, values: dict[Any, Any]) -> int:
    """Insert the rows of a queryset into the table of ``model``, a column for each of these fields; returns how
    many."""
    quote = connection.ops.quote_name
    named = {f"set{index}": value for index, value in enumerate(values.values())}
    selected = rows.annotate(**named)
    for (name, value), field in zip(named.items(), values, strict=True):
        # The id of a message in a column of text, as a UUIDField of mssql-django has it.
        if connection.vendor == "microsoft" and isinstance(field, UUIDField) and _is_guid(selected, name, connection):
            named[name] = _CastUuid(value, field)
    selected = rows.annotate(**named).values_list(*named)
    select, params = selected.query.get_compiler(connection=connection).as_sql()
    columns = ", ".join(quote(field.column) for field in values)
    # Index: that of ``Among``. Safe: the caller's transaction, which has locked the rows that are read.
    sql = f"INSERT INTO {quote(model._meta.db_table)} ({columns}) {select}"
    with connection.cursor() as cursor:
        if connection.vendor == "microsoft":
            cursor.execute(f"{sql}; SELECT @@ROWCOUNT", params)  # rowcount is -1 where NOCOUNT is on
            return counted_rows(cursor)
        cursor.execute(sql, params)
        return int(cursor.rowcount)


def _is_guid(rows: Any, name: str, connection: Any) -> bool:
    return bool(rows.query.annotations[name].output_field.db_type(connection) == "uniqueidentifier")


def as_value(value: Any, field: Any) -> Any:
    """A plain value as a value of this field; an expression unchanged."""
    return value if hasattr(value, "resolve_expression") else Cast(Value(value, output_field=field), field)
