"""What the handler of a whole set of messages writes its statements with, on either database: which messages they are, a field
of their bodies, and an INSERT from a SELECT. These are parts of statements that Django's ORM puts together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from django.db.models import CharField, F, Func, Lookup, TextField, Value
from django.db.models.functions import Cast

from .sqlserver.session import json_of

if TYPE_CHECKING:
    _Lookup = Lookup[Any]
else:
    _Lookup = Lookup  # no generic outside of the type checker's stubs


class Among(_Lookup):
    """Whether a number is one of these: one parameter, however many there are. (A lookup: SQL Server has no conditions that are
    values, and Django would compare any other one with a bit.)"""

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
        # Index: as above. One text for any number of them.
        return f"{column} IN (SELECT CAST([value] AS bigint) FROM OPENJSON(%s))", [*params, str(json_of(self.rhs))]


class _BodyText(Func):
    """The text at a path of a body that is JSON; NULL where there is none."""

    output_field = TextField()

    def __init__(self, path: Sequence[str | int], *, is_long: bool) -> None:
        super().__init__(F("body"))
        self.path, self.is_long = list(path), is_long

    def as_postgresql(self, compiler: Any, connection: Any, **_: Any) -> tuple[str, list[Any]]:
        body, params = compiler.compile(self.source_expressions[0])
        # ``json``, since one value is read: ``jsonb`` would be built first.
        return f"(convert_from({body}, 'UTF8')::json #>> %s::text[])", [*params, [str(one) for one in self.path]]

    def as_microsoft(self, compiler: Any, connection: Any, **_: Any) -> tuple[str, list[Any]]:
        body, params = compiler.compile(self.source_expressions[0])
        steps = "".join(f"[{one}]" if isinstance(one, int) else f".{_quoted(one)}" for one in self.path)
        path = f"${steps}".replace("'", "''").replace("%", "%%")
        # There is no other way from UTF-8 to text on every version. What would end the CDATA is written as JSON can write it, too.
        opening = 'CONVERT(varbinary(max), \'<?xml version="1.0" encoding="UTF-8"?><![CDATA[\')'
        within = f"CONVERT(varbinary(max), REPLACE(CONVERT(varchar(max), {body}), ']]>', ']]\\u003E'))"
        text = f"CAST({opening} + {within} + CONVERT(varbinary(max), ']]>') AS xml).value('.', 'nvarchar(max)')"
        if not self.is_long:
            return f"JSON_VALUE({text}, '{path}')", params  # an aggregate takes it, and no subquery
        # JSON_VALUE makes NULL of what is longer than 4,000 characters. As the one element of a list: else a body that is a list
        # would be as many rows.
        return f"(SELECT j.[v] FROM OPENJSON(N'[' + {text} + N']') WITH ([v] nvarchar(max) '{path}') AS j)", params


def _quoted(name: str) -> str:
    return '"' + name.replace("\\", "\\\\").replace('"', '\\"') + '"'


def body_field(path: Sequence[str | int], output_field: Any) -> Any:
    """A value of a body that is JSON, as this kind of field."""
    text = _BodyText(path, is_long=isinstance(output_field, CharField | TextField))
    return text if isinstance(output_field, TextField) else Cast(text, output_field)


def insert_select(connection: Any, rows: Any, model: Any, values: dict[Any, Any]) -> int:
    """Insert into the table of ``model`` what a queryset selects, a column for each of these fields; how many rows."""
    quote = connection.ops.quote_name
    named = {f"set{place}": value for place, value in enumerate(values.values())}
    selected = rows.annotate(**named).values_list(*named)
    select, params = selected.query.get_compiler(connection=connection).as_sql()
    columns = ", ".join(quote(field.column) for field in values)
    # Index: that of ``Among``. Safe: the caller's transaction, which has locked the rows that are read.
    with connection.cursor() as cursor:
        cursor.execute(f"INSERT INTO {quote(model._meta.db_table)} ({columns}) {select}", params)
        return int(cursor.rowcount)


def as_value(value: Any, field: Any) -> Any:
    """A plain value as one of this field; an expression as it is."""
    return value if hasattr(value, "resolve_expression") else Cast(Value(value, output_field=field), field)
