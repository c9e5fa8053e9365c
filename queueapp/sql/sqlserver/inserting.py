"""Putting messages into a table on SQL Server: one by one, and in bulk as JSON.

The driver's bulk copy has a connection of its own, so it is outside the caller's transaction; ``INSERT … SELECT … FROM
OPENJSON`` is inside. One parameter holds any number of rows, so there is one text and one plan. The order of the rows
is the order of their identity numbers. A body is hex there: JSON has no bytes.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator
from typing import Any

from ..message_columns import BY_NAME, NO_OPTIONS, SENT, Kind, MessageColumn, Outgoing, Run
from .rows import type_of
from .session import LATER, Json, execute, later_params

#: Rows and characters of one statement. Its row locks stay well below the 5,000 at which a server locks the table.
_ROWS = 1_000
_CHARACTERS = 4_000_000


def _in_json(one: MessageColumn) -> tuple[str, str]:
    """(type in the JSON, value in the SELECT) of an optional attribute."""
    value = f"r.[{one.name}]"
    if one.kind is not Kind.TIME:
        return type_of(one), value
    later = f"DATEADD(millisecond, {value} %% 86400000, DATEADD(day, {value} / 86400000, SYSUTCDATETIME()))"
    return "bigint", later


#: Named only where a message of the statement has something to say.
_OPTIONAL = {"body": ("varchar(max)", "CONVERT(varbinary(max), r.[body], 2)")}
_OPTIONAL |= {one.name: _in_json(one) for one in SENT}
_NAMES = tuple(_OPTIONAL)
_NOTHING_SAID = (None, *NO_OPTIONS)

#: Columns and the expressions that fill them.
Pairs = list[tuple[str, str]]


def _shape(message: Outgoing, columns: dict[str, str]) -> tuple[bool, ...]:
    """Which optional attributes differ from their column's default. A column that the table lacks is never named."""
    said = zip(_NAMES, message[2:], _NOTHING_SAID, strict=True)
    return tuple([value != nothing and name in columns for name, value, nothing in said])


def given(one: MessageColumn, value: Any) -> tuple[str, tuple[Any, ...]]:
    """(text, parameters) of a value that is not None; a duration ends in a time by the database's clock."""
    if one.kind is Kind.TIME:
        return LATER, later_params(value)
    return (str(int(value)), ()) if one.kind is Kind.BOOL else ("%s", (value,))


def insert_statement(
    table: str, columns: dict[str, str], filled: Pairs, known: dict[tuple[bool, ...], str], message: Outgoing
) -> tuple[str, tuple[Any, ...]]:
    """The INSERT of one message and its parameters; ``known`` keeps one text per combination of columns."""
    shape = _shape(message, columns)
    params: list[Any] = [message.id, message.headers]
    if shape[0]:
        params.append(message.body)
    used = [(one, value) for one, value, is_used in zip(SENT, message[3:], shape[1:], strict=True) if is_used]
    values = [(one.name, *given(one, value)) for one, value in used]
    for _, _, some in values:
        params += some
    # A bit stands in the text. It is there only where it differs from its default, so there is one text per shape.
    sql = known.get(shape)
    if sql is None:
        pairs = [(columns["id"], "%s"), (columns["headers"], "%s"), *([(columns["body"], "%s")] if shape[0] else [])]
        pairs += [(columns[name], text) for name, text, _ in values] + filled
        # Index: none is read. Safe: one row in the caller's transaction; expiry by the database's clock.
        sql = known[shape] = (
            f"INSERT INTO {table} ({', '.join(column for column, _ in pairs)}) "
            f"VALUES ({', '.join(value for _, value in pairs)})"
        )
    return sql, tuple(params)


def insert_rows(
    connection: Any, table: str, columns: dict[str, str], filled: Pairs, runs: Iterable[Run], priority64: bool = False
) -> int:
    """Store all messages in the caller's transaction; returns how many. ``priority64``: their priority has 64 bits."""
    types = {name: kind for name, (kind, _) in _OPTIONAL.items()}
    types["priority"] = type_of(BY_NAME["priority"], priority64=priority64)
    count = 0
    for rows, shape in _chunks(runs, columns):
        used = [name for name, is_used in zip(_NAMES, shape, strict=True) if is_used]
        pairs = [(columns["id"], "r.[id]"), (columns["headers"], "r.[headers]")]
        pairs += [(columns[name], _OPTIONAL[name][1]) for name in used] + filled
        fields = [f"[{name}] {types[name]} '$[{n + 3}]'" for n, name in enumerate(_NAMES) if name in used]
        # Index: none is read. Safe: identity numbers of INSERT … SELECT … ORDER BY are given in that order; fewer than
        # 5,000 rows a statement, so receivers never meet a table lock; expiry by the database's clock.
        sql = (
            f"INSERT INTO {table} ({', '.join(column for column, _ in pairs)}) "
            f"SELECT {', '.join(value for _, value in pairs)} FROM OPENJSON(%s) WITH ([n] int '$[0]', "
            f"{', '.join([_ID, _HEADERS, *fields])}) AS r ORDER BY r.[n]"
        )
        count += execute(connection, sql, (Json("[" + ",".join(rows) + "]"),))
    return count


_ID, _HEADERS = "[id] uniqueidentifier '$[1]'", "[headers] nvarchar(max) '$[2]'"


def _chunks(runs: Iterable[Run], columns: dict[str, str]) -> Iterator[tuple[list[str], tuple[bool, ...]]]:
    """Rows as JSON arrays, some at a time, and which optional columns those rows need.

    Rows are drawn before their statement runs, because the iterable may be a queryset on the same connection.
    """
    encode = json.JSONEncoder(check_circular=False, separators=(",", ":")).encode
    rows: list[str] = []
    characters, shape = 0, (False,) * len(_NAMES)
    for like, ids, bodies in runs:
        headers, rest = like.headers, like[3:]
        shapes = [_shape(like._replace(body=body), columns) for body in (None, b"")]
        for identity, body in zip(ids, bodies, strict=True):
            text = None if body is None else body.hex()
            row = encode([len(rows), str(uuid.UUID(bytes=identity)), headers, text, *rest])
            rows.append(row)
            characters += len(row)
            shape = tuple(map(max, shape, shapes[body is not None]))
            if len(rows) == _ROWS or characters >= _CHARACTERS:
                yield rows, shape
                rows, characters, shape = [], 0, (False,) * len(_NAMES)
    if rows:
        yield rows, shape
