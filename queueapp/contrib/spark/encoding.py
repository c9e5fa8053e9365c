"""From Spark's Arrow batches to Arrow batches of messages, on the executors.

Everything is done by column; only what Python must look at (typed bodies, header maps, given ids) is done by row. One
core encodes about 300,000 typed rows a second (15 fields, two of them times), which is more than one COPY takes.
"""

from __future__ import annotations

import os
import sys
import time
import uuid
from array import array
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, date, datetime, timedelta
from itertools import repeat
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from ... import messages
from ...errors import InvalidMessage, UndecodableMessage
from ...messages.bodies import encode_alike
from ...sql.message_columns import BY_NAME, SENT, Kind, kind_of
from ...sql.spark import DUE_AT, ENTERS, MARKS, STAGED, attribute_of
from .columns import Plan, load_message_type, message_fields
from .errors import InvalidDataFrame, SparkSinkError
from .typed import rebuild

_KINDS = {
    Kind.TEXT: pa.string(),
    Kind.INT16: pa.int16(),
    Kind.INT64: pa.int64(),
    Kind.BOOL: pa.bool_(),
    Kind.TIME: pa.timestamp("us", "UTC"),
}

#: Arrow types that travel in binary as they are: a uuid is its 16 bytes.
ARROW_TYPES: dict[str, pa.DataType] = {
    "id": pa.binary(16),
    "headers": pa.string(),
    "body": pa.binary(),
    **{column.name: _KINDS[column.kind] for column in SENT},
}
#: Of the columns that say where a message goes.
_WHERE_TYPES = {DUE_AT: pa.timestamp("us", "UTC"), MARKS: pa.string(), ENTERS: pa.bool_()}

#: What a null means in a column that the table does not let be null.
_DEFAULTS: dict[str, Any] = {"headers": "{}"} | {
    column.name: column.default for column in SENT if column.default is not None
}
#: Columns for foreign readers of the table, and the headers with the same value for handlers.
_HEADER_OF = {column.name: column.header for column in SENT if column.header}
_LONGEST = {column.name: column.max_length for column in SENT if column.max_length}

#: The latest time that ``send`` accepts is so far from now. (Its constant is not importable without Django.)
FAR_FUTURE = timedelta(days=100 * 365)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_NAIVE_EPOCH = _EPOCH.replace(tzinfo=None)
_EPOCH_ORDINAL = date(1970, 1, 1).toordinal()
#: 0001-01-02 in UTC: a day later than Python's first, for every time zone of a reader.
_FIRST_MICROSECOND = -62_135_510_400_000_000


class IdSource:
    """Time-ordered ids (UUID version 7), strictly rising within one task attempt, 3 million a second."""

    def __init__(self) -> None:
        self._next = 0

    def take(self, count: int) -> pa.Array:
        """The next ids as an Arrow array. 4,096 share a millisecond; more of them run ahead of the clock."""
        first = max(self._next, (time.time_ns() // 1_000_000) << 12)
        self._next = first + count
        high = array("Q", [(n >> 12) << 16 | 0x7000 | n & 0xFFF for n in range(first, first + count)])
        low = array("Q", [n >> 2 | 1 << 63 for n in array("Q", os.urandom(8 * count))])
        both = array("Q", bytes(16 * count))
        both[0::2], both[1::2] = high, low
        if sys.byteorder == "little":
            both.byteswap()
        return pa.FixedSizeBinaryArray.from_buffers(pa.binary(16), count, [None, pa.py_buffer(both.tobytes())])


class RowEncoder:
    """Encodes the batches of one task attempt."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._ids = IdSource()
        self._kinds = (
            ARROW_TYPES | _WHERE_TYPES | {"priority": _KINDS[kind_of(BY_NAME["priority"], priority64=plan.ranked)]}
        )
        self._staged = pa.schema([(name, self._kinds[name]) for name in plan.staged])
        #: Of what ``encode`` returns.
        self.schema = pa.schema([(name, _stored_type(self._kinds, name)) for name in plan.stored])
        if plan.message_schema is not None:
            schema, self._names = plan.message_schema
            self._class = rebuild(schema)
        elif plan.message_type is not None:
            self._class = load_message_type(plan.message_type)
            self._names = {name: wire for name, (wire, _) in message_fields(self._class).items()}
        self._entering = None if plan.entering is None else rules_of(plan.label, plan.entering)
        self._routes = [
            (route, None if route.entering is None else rules_of(route.label, route.entering)) for route in plan.routes
        ]
        #: Of all rows that were encoded: the bytes of their bodies.
        self.body_bytes = 0
        #: Rows that the queue's filter has left out.
        self.refused = 0
        #: Of a topic: rows that enter each of its queues.
        self.entered = [0] * len(plan.routes)

    def encode(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The messages of one batch. Raises InvalidDataFrame for a value that cannot be part of a message."""
        encoded = self._encoded(batch)
        self.body_bytes += pc.sum(pc.binary_length(encoded["body"])).as_py() or 0
        return encoded

    def _encoded(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        rows = batch.num_rows
        if self._plan.message_type is not None:
            due_at = batch[DUE_AT] if DUE_AT in self._plan.staged else None
            fields = batch if due_at is None else batch.drop_columns([DUE_AT])
            given = {"body": self._typed_bodies(fields)} | ({} if due_at is None else {DUE_AT: due_at})
        else:
            given = dict(zip(batch.schema.names, batch.columns, strict=True))
        columns = {name: self._column(name, given.get(name), rows) for name in self._plan.staged}
        if "headers" in columns:
            columns["headers"] = self._headers(given, columns, rows)
        encoded = pa.record_batch(list(columns.values()), schema=self._staged)
        if self._plan.topic is not None:
            return self._routed(encoded)
        return encoded if self._entering is None else self._entered(encoded, self._entering)

    def _routed(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The messages of a topic, with what differs from queue to queue."""
        rows = batch.num_rows
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        bodies = columns["body"].to_pylist()
        headers = columns["headers"].to_pylist() if "headers" in columns else [self._plan.headers or "{}"] * rows
        enters: list[list[bool]] = []
        for route, rules in self._routes:
            found = None if rules is None else self._evaluated(rules, route.label, headers, bodies)
            matches = [True] * rows if found is None else [result.matches for result in found]
            enters.append(matches)
            self.entered[route.number] += sum(matches)
            made: dict[str, list[Any]] = {ENTERS: matches}
            if found is not None:
                made |= {"priority": [result.priority for result in found]}
                made |= {"is_barrier": [bool(result.is_barrier) for result in found]}
            if route.foreign:
                ids = map(uuid.UUID, (value.hex() for value in columns["id"].to_pylist()))
                made["headers"] = [messages.to_nservicebus(*row) for row in zip(headers, ids, strict=True)]
            for name in route.columns:
                columns[name] = pa.array(made[attribute_of(name)], _stored_type(self._kinds, name))
        if self._plan.marks_differ:
            columns[MARKS] = pa.array([self._plan.marks(row) for row in zip(*enters, strict=True)], pa.string())
        return pa.record_batch(list(columns.values()), schema=self.schema)

    def _evaluated(self, rules: Any, label: str, headers: Iterable[str], bodies: list[Any]) -> list[Any]:
        try:
            return [rules.evaluate(*row) for row in zip(headers, bodies, strict=False)]
        except UndecodableMessage as error:
            raise InvalidDataFrame(f"A row cannot enter queue {label}, whose expressions read it. {error}") from error

    def _entered(self, batch: pa.RecordBatch, entering: Any) -> pa.RecordBatch:
        """The rows that the queue's filter matches, with what its other expressions make of them."""
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        bodies = columns["body"].to_pylist()
        headers = columns["headers"].to_pylist() if "headers" in columns else repeat(self._plan.headers or "{}")
        found = self._evaluated(entering, self._plan.label, headers, bodies)
        if found and found[0].priority is not None:
            columns["priority"] = pa.array([evaluated.priority for evaluated in found], self._kinds["priority"])
        if found and found[0].is_barrier is not None:
            given = columns["is_barrier"].to_pylist()
            columns["is_barrier"] = pa.array(
                [evaluated.is_barrier or is_barrier for evaluated, is_barrier in zip(found, given, strict=True)]
            )
        kept = pa.array([evaluated.matches for evaluated in found], pa.bool_())
        entered = pa.record_batch(list(columns.values()), schema=self.schema).filter(kept)
        self.refused += batch.num_rows - entered.num_rows
        return entered

    def _typed_bodies(self, batch: pa.RecordBatch) -> pa.Array:
        convert, cls = msgspec.convert, self._class
        names = [self._names[name] for name in batch.schema.names]
        rows = []
        try:
            columns = [python_values(column) for column in batch.columns]
        except (OverflowError, ValueError) as error:
            raise InvalidDataFrame(
                f"A row for queue {self._plan.label} has a time outside of the years 1 to 9999 (UTC)."
            ) from error
        for values in zip(*columns, strict=True):
            try:
                rows.append(convert(dict(zip(names, values, strict=True)), cls))
            except (msgspec.ValidationError, TypeError, ValueError, OverflowError) as error:
                # The reason and the field, never the row: this text goes into the logs of a cluster.
                raise InvalidDataFrame(
                    f"A row for queue {self._plan.label} is no {self._plan.message_type}: {error}."
                ) from error
        try:
            # The encoder of ``send``, which refuses NaN and the infinities.
            bodies = encode_alike(rows)[1] if rows else []
        except InvalidMessage as error:
            raise InvalidDataFrame(f"A row for queue {self._plan.label} cannot be stored. {error}") from error
        return pa.array(bodies, pa.binary())

    def _column(self, name: str, column: pa.Array | None, rows: int) -> pa.Array:
        kind = self._kinds[name]
        if column is None:
            return self._ids.take(rows) if name == "id" else pa.array([_DEFAULTS.get(name)] * rows, kind)
        if name == "id":
            return self._given_ids(column, rows)
        if name == "headers":
            return column
        if name == "priority" and not self._plan.ranked:
            self._check_priority(column)
        column = column.cast(kind)
        if name in _DEFAULTS:
            column = column.fill_null(_DEFAULTS[name])
        if name in _LONGEST:
            self._check_text(name, column)
        if pa.types.is_timestamp(kind):
            self._check_time(name, column)
        return column

    def _given_ids(self, column: pa.Array, rows: int) -> pa.Array:
        ids = self._ids.take(rows)
        if column.null_count == rows:
            return ids
        try:
            given = [None if text is None else uuid.UUID(text).bytes for text in column.to_pylist()]
        except ValueError as error:
            bad = next(text for text in column.to_pylist() if text is not None and not _is_uuid(text))
            raise InvalidDataFrame(f"Column id for queue {self._plan.label}: {bad[:100]!r} is not a UUID.") from error
        return pc.coalesce(pa.array(given, pa.binary(16)), ids)

    def _headers(self, given: dict[str, pa.Array], columns: dict[str, pa.Array], rows: int) -> pa.Array:
        """The stored headers of every row: checked, with the columns that are headers as well, under the names of the
        table's readers."""
        column = given.get("headers")
        checked = pa.repeat(self._plan.headers or "{}", rows) if column is None else self._checked_headers(column)
        if self._plan.topic is None and not self._plan.foreign and not columns.keys() & _HEADER_OF.keys():
            return checked
        stored = checked.to_pylist()
        if self._plan.topic is not None and column is not None:
            of_topic = {messages.TOPIC: self._plan.topic}
            stored = [messages.encode_headers(messages.decode_headers(text) | of_topic) for text in stored]
        by_header = {
            name: columns[attribute].to_pylist() for attribute, name in _HEADER_OF.items() if attribute in columns
        }
        for name, values in by_header.items():
            for row, value in enumerate(values):
                if value:
                    stored[row] = messages.encode_headers({name: value} | messages.decode_headers(stored[row]))
        if self._plan.foreign:
            ids = columns["id"].to_pylist()
            stored = [
                messages.to_nservicebus(text, uuid.UUID(bytes=id_)) for text, id_ in zip(stored, ids, strict=True)
            ]
        return pa.array(stored, pa.string())

    def _checked_headers(self, column: pa.Array) -> pa.Array:
        if pa.types.is_map(column.type):
            return pa.array(list(self._checked(column.to_pylist())), pa.string())
        # Most rows have the same few.
        found = column.cast(pa.string()).dictionary_encode(null_encoding="encode")
        return pa.array(list(self._checked(found.dictionary.to_pylist())), pa.string()).take(found.indices)

    def _checked(self, values: Iterable[Any]) -> Iterator[str]:
        encode, decode = messages.encode_headers, msgspec.json.Decoder(dict[str, str]).decode
        for value in values:
            try:
                if value is None:
                    yield "{}"
                elif not isinstance(value, str):
                    yield encode(dict(value))
                elif "\\u0000" in value:
                    yield encode(decode(value))
                else:
                    decode(value)
                    yield value
            except (InvalidMessage, msgspec.DecodeError) as error:
                raise InvalidDataFrame(
                    f"Column headers for queue {self._plan.label} holds something else than an object of strings: "
                    f"{error}"
                ) from error

    def _check_priority(self, column: pa.Array) -> None:
        highest = self._plan.priorities - 1
        bounds = pc.min_max(column)
        for bound in (bounds["min"].as_py(), bounds["max"].as_py()):
            if bound is not None and not 0 <= bound <= highest:
                raise InvalidDataFrame(
                    f"Column priority for queue {self._plan.label}: {bound} is not accepted, it must be from 0 to "
                    f"{highest} (Delivery.priorities = {self._plan.priorities})."
                )

    def _check_time(self, name: str, column: pa.Array) -> None:
        """Refuse a time that ``send`` refuses, or that Python cannot read from the row again."""
        bounds = pc.min_max(column.cast(pa.int64()))
        first, last = bounds["min"].as_py(), bounds["max"].as_py()
        latest = int((datetime.now(UTC) + FAR_FUTURE - _EPOCH).total_seconds() * 1_000_000)
        if first is not None and (first < _FIRST_MICROSECOND or last > latest):
            raise InvalidDataFrame(
                f"Column {name} for queue {self._plan.label} has a time that is not accepted: it must be at most 100 "
                "years from now, and not before the year 1."
            )

    def _check_text(self, name: str, column: pa.Array) -> None:
        if pc.any(pc.match_substring(column, "\0")).as_py():
            raise InvalidDataFrame(
                f"Column {name} for queue {self._plan.label} has a text with a NUL; a string of at most "
                f"{_LONGEST[name]} characters without one is accepted."
            )
        longest = pc.max(pc.utf8_length(column)).as_py()
        if longest is not None and longest > _LONGEST[name]:
            raise InvalidDataFrame(
                f"Column {name} for queue {self._plan.label} holds a text of {longest} characters; at most "
                f"{_LONGEST[name]} are accepted."
            )


def rules_of(label: str, entering: Mapping[str, Any]) -> Any:
    """The expressions of a queue, compiled in this process. Raises SparkSinkError where the extra is missing."""
    try:
        from ...expressions.enqueue_rules import EnqueueRules
    except ImportError as error:
        raise SparkSinkError(
            f"Queue {label} has expressions (filter, priority, barrier_expression), which executors evaluate: install "
            f"queueapp[expressions] where they run. {error}"
        ) from error
    return EnqueueRules(**entering)


def _stored_type(kinds: Mapping[str, pa.DataType], column: str) -> pa.DataType:
    """The type of a staging column. A priority that an expression makes has 64 bits."""
    attribute = attribute_of(column)
    if attribute == "priority" and attribute != column:
        return pa.int64()
    return kinds[attribute]


def python_values(column: pa.Array) -> list[Any]:
    """A column as Python values. Times and dates are made here: pyarrow takes 2.9 µs for an aware time, this 0.2."""
    kind = column.type
    if pa.types.is_timestamp(kind):
        epoch = _NAIVE_EPOCH if kind.tz is None else _EPOCH
        micros = column.cast(pa.timestamp("us", kind.tz)).cast(pa.int64()).to_pylist()
        return [None if value is None else epoch + timedelta(0, 0, value) for value in micros]
    if pa.types.is_date32(kind):
        days = column.cast(pa.int32()).to_pylist()
        return [None if value is None else date.fromordinal(value + _EPOCH_ORDINAL) for value in days]
    if pa.types.is_nested(kind):
        return column.to_pylist(maps_as_pydicts="strict")  # type: ignore[no-any-return]
    return column.to_pylist()  # type: ignore[no-any-return]


def _is_uuid(text: str) -> bool:
    try:
        uuid.UUID(text)
    except ValueError:
        return False
    return True


assert set(ARROW_TYPES) == set(STAGED)
