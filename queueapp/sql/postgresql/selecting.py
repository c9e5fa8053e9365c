"""PostgreSQL: messages from the rows of a SELECT.

What a row costs is its JSON and its id. ``json_build_object`` looks up how to write each value anew for each row, and
``uuidv7()`` asks for ten random bytes; here ``concat`` writes the JSON, which remembers, and ids count up from a random one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ..inserts import Source
from ..message_columns import BY_NAME, NO_OPTIONS, OPTIONS, Kind, Outgoing
from ..tables import QueueTable
from .session import execute, hot_cursor, translated

_INTEGERS = {20, 21, 23, 26}
_BOOLEAN, _BYTES, _JSON, _PLAIN = {16}, {17}, {114, 3802}, {1700, 2950}
#: Of an id: its last 64 bits, of which the first is set, as a signed number.
_LOW = 2**64
_AT_ONCE = 40


def _as_json(column: str, type_: int) -> str:
    """The text of a value in JSON; NULL for NULL."""
    if type_ in _INTEGERS or type_ in _JSON:
        return f"{column}::text"
    if type_ in _BOOLEAN:
        return f"CASE WHEN {column} THEN 'true' WHEN NOT {column} THEN 'false' END"
    if type_ in _PLAIN:  # as ``send()`` writes them: texts of nothing that must be escaped
        return f"'\"' || {column}::text || '\"'"
    if type_ in _BYTES:
        return f"'\"' || translate(encode({column}, 'base64'), E'\\n', '') || '\"'"
    return f"to_json({column})::text"


class PostgresqlSelecting:
    """The verb of one queue; ``_q`` and ``_c`` are its names, quoted."""

    table: QueueTable
    _q: str
    _c: dict[str, str]
    _clock: str
    _filled: dict[str, str]

    def ordered(self, select: str) -> str:
        return select

    def columns_of(self, connection: Any, source: Source) -> list[tuple[str, int]]:
        connection.validate_no_broken_transaction()
        connection.ensure_connection()
        cursor = hot_cursor(connection)
        # Index: none; no row is read.
        with connection.wrap_database_errors:
            cursor.execute(f"SELECT * FROM ({source.sql}) AS s LIMIT 0", tuple(source.params))
            described = [(one.name, one.type_code) for one in cursor.description or ()]
        if source.names is None:
            return described
        return [(name, type_) for name, (_, type_) in zip(source.names, described, strict=True)]

    def insert_select(self, connection: Any, like: Outgoing, source: Source, columns: Sequence[tuple[str, int]]) -> int:
        high, low = divmod(like.id.int, _LOW)
        pairs = [
            ("id", "(%s || to_hex(%s::bigint + row_number() OVER ()))::uuid"),
            ("headers", "%s"),
            ("body", f"convert_to({self._body_of(columns)}, 'UTF8')"),
        ]
        # A negative number in two's complement: always sixteen digits.
        params: list[Any] = [f"{high:016x}", low - _LOW - 1, like.headers]
        params += _texts(columns)
        for name, value, default in zip(OPTIONS, like[3:], NO_OPTIONS, strict=True):
            if value != default and name in self._c:
                later = BY_NAME[name].kind is Kind.TIME
                pairs.append((name, f"{self._clock} + %s * interval '1 ms'" if later else "%s"))
                params.append(value)
        # What is evaluated when it enters is held by the table's default.
        held = {"lease_expires"} if self.table.has_unevaluated else set()
        pairs += [(name, value) for name, value in self._filled.items() if name not in held]
        names = ", ".join(f"c{n}" for n in range(len(columns)))
        # Index: whatever the caller's SELECT uses. Safe: the caller's transaction; identity numbers and ids are given in the order
        # in which the rows come.
        sql = (
            f"INSERT INTO {self._q} ({', '.join(self._c[name] for name, _ in pairs)}) "
            f"SELECT {', '.join(value for _, value in pairs)} FROM ({source.sql}) AS s({names})"
        )
        with translated(connection, self.table.db_table):
            return execute(connection, sql, (*params, *source.params))

    @staticmethod
    def _body_of(columns: Sequence[tuple[str, int]]) -> str:
        parts = [f"%s::text, coalesce({_as_json(f's.c{n}', type_)}, 'null')" for n, (_, type_) in enumerate(columns)]
        # A function takes a hundred arguments at most.
        groups = [", ".join(parts[first : first + _AT_ONCE]) for first in range(0, len(parts), _AT_ONCE)]
        if len(groups) > 1:
            groups = [f"concat({group})" for group in groups]
        return f"concat({', '.join(groups)}, '}}')"


def _texts(columns: Sequence[tuple[str, int]]) -> list[str]:
    """What stands before each value: the names of an object, as parameters, since they may hold anything."""
    names = (msgspec.json.encode(name).decode() for name, _ in columns)
    return [f"{',' if n else '{'}{name}:" for n, name in enumerate(names)]
