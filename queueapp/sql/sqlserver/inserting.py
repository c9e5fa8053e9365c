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

from ..outgoing import Outgoing, Run
from .session import LATER, Json, execute, later_params

#: Rows and characters of one statement. Its row locks stay well below the 5,000 at which a server locks the table.
_ROWS = 1_000
_CHARACTERS = 4_000_000

#: Optional attributes: JSON type and value in the SELECT. Named only where a message of the statement has one.
_OPTIONAL = {
    "body": ("varchar(max)", "CONVERT(varbinary(max), r.[body], 2)"),
    "expires": (
        "bigint",
        "DATEADD(millisecond, r.[expires] %% 86400000, DATEADD(day, r.[expires] / 86400000, SYSUTCDATETIME()))",
    ),
    "recipient": ("nvarchar(200)", "r.[recipient]"),
    "priority": ("smallint", "r.[priority]"),
    "correlation_id": ("nvarchar(255)", "r.[correlation_id]"),
    "reply_to_address": ("nvarchar(255)", "r.[reply_to_address]"),
    "is_barrier": ("bit", "r.[is_barrier]"),
}
_NAMES = tuple(_OPTIONAL)

#: Columns and the expressions that fill them.
Pairs = list[tuple[str, str]]


def _shape(message: Outgoing, columns: dict[str, str]) -> tuple[bool, ...]:
    """Which optional attributes differ from their column's default. A column that the table lacks is never named."""
    _, _, body, expires_ms, recipient, priority, correlation_id, reply_to, is_barrier = message
    differs = (body is not None, expires_ms is not None, recipient != "", priority != 0,
               correlation_id is not None, reply_to is not None, is_barrier)  # fmt: skip
    return tuple(used and name in columns for name, used in zip(_NAMES, differs, strict=True))


def insert_statement(
    table: str, columns: dict[str, str], filled: Pairs, known: dict[tuple[bool, ...], str], message: Outgoing
) -> tuple[str, tuple[Any, ...]]:
    """The INSERT of one message and its parameters; ``known`` keeps one text per combination of columns."""
    shape = _shape(message, columns)
    values: dict[str, tuple[Any, ...]] = {
        "body": (message.body,),
        "expires": later_params(message.expires_ms or 0),
        "recipient": (message.recipient,),
        "priority": (message.priority,),
        "correlation_id": (message.correlation_id,),
        "reply_to_address": (message.reply_to_address,),
        "is_barrier": (),
    }
    used = [name for name, is_used in zip(_NAMES, shape, strict=True) if is_used]
    sql = known.get(shape)
    if sql is None:
        texts = {"expires": LATER, "is_barrier": "1"}
        pairs = [(columns["id"], "%s"), (columns["headers"], "%s")]
        pairs += [(columns[name], texts.get(name, "%s")) for name in used] + filled
        # Index: none is read. Safe: one row in the caller's transaction; expiry by the database's clock.
        sql = known[shape] = (
            f"INSERT INTO {table} ({', '.join(column for column, _ in pairs)}) "
            f"VALUES ({', '.join(value for _, value in pairs)})"
        )
    return sql, (message.id, message.headers, *(value for name in used for value in values[name]))


def insert_rows(connection: Any, table: str, columns: dict[str, str], filled: Pairs, runs: Iterable[Run]) -> int:
    """Store all messages in the caller's transaction; returns how many."""
    count = 0
    for rows, shape in _chunks(runs, columns):
        used = [name for name, is_used in zip(_NAMES, shape, strict=True) if is_used]
        pairs = [(columns["id"], "r.[id]"), (columns["headers"], "r.[headers]")]
        pairs += [(columns[name], _OPTIONAL[name][1]) for name in used] + filled
        fields = [f"[{name}] {_OPTIONAL[name][0]} '$[{n + 3}]'" for n, name in enumerate(_NAMES) if name in used]
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
