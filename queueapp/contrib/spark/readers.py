"""The source: ``spark.read.format("queue")`` looks at messages and takes none.

    driver     schema() -> reader -> partitions(): ranges of equal width from the first to the last key
    executor   read(range): pages of ``fetch_size`` rows by key, each a statement of its own, on one connection

Filters are options and not ``pushFilters``: up to 4.3 Spark keeps what was pushed with the DataFrame and not with the
query, so that a second query on it would miss rows.

No lease is taken, no row is locked, and no snapshot is older than one page: a reader of an hour holds up no vacuum. So
a read is no snapshot of the whole table. A message that is acked meanwhile may be missing, one that is sent
meanwhile is missing, and none is there twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from ... import messages
from ...errors import InvalidOption, UndecodableMessage
from ...sql import spark_read_sql
from ...sql.spark import Condition, ReadKind, SourceTable
from .columns import load_message_type
from .errors import InvalidDataFrame, listed
from .options import State
from .targets import Database, Snapshot
from .typed import Schema, describe, plain_of, rebuild, spark_type

_TYPES: dict[ReadKind, DataType] = {
    ReadKind.INT: IntegerType(),
    ReadKind.LONG: LongType(),
    ReadKind.POSITION: LongType(),
    ReadKind.TEXT: StringType(),
    ReadKind.UUID: StringType(),
    ReadKind.BYTES: BinaryType(),
    ReadKind.BOOL: BooleanType(),
    ReadKind.TIME: TimestampType(),
    ReadKind.NAIVE_TIME: TimestampType(),
}

#: The column that says whose message a row of a shared table is.
_OWNER = {State.DELAYED: "destination", State.POISON: "queue"}

#: The column of a message's time.
_TIME = {State.QUEUE: "enqueued_at", State.DELAYED: "due", State.POISON: "failed_at", State.JOURNAL: "published_at"}

#: Fetches one statement's rows.
Fetch = Callable[[str, Sequence[Any]], pa.Table]


@dataclass(frozen=True, slots=True)
class Body:
    """How typed bodies are read: the names of the type, its version, and its schema."""

    names: tuple[str, ...]
    version: int
    schema: Schema


@dataclass(frozen=True)
class Source:
    """One read: all that its processes have to know."""

    database: Database
    table: SourceTable
    columns: tuple[str, ...]
    conditions: tuple[Condition, ...]
    partitions: int
    fetch_size: int
    body: Body | None = None
    #: Of the journal: what it is read of.
    topic: str = ""

    @property
    def schema(self) -> StructType:
        """The columns as Spark sees them."""
        return StructType([StructField(name, self._type(name), True) for name in self.columns])

    def _type(self, name: str) -> DataType:
        if name == "body" and self.body is not None:
            return spark_type(self.body.schema)
        return _TYPES[self.table.columns[name][1]]

    def reduced_to(self, schema: StructType) -> Source:
        """The source with the columns that a user asked for (``spark.read.schema``). Raises InvalidDataFrame."""
        known = {field.name: field.dataType for field in replace(self, columns=tuple(self.table.columns)).schema.fields}
        for field in schema.fields:
            if known.get(field.name) != field.dataType:
                kind = known.get(field.name)
                raise InvalidDataFrame(
                    f"The schema to read has a column {field.name} {field.dataType.simpleString()}; accepted are "
                    + (f"{field.name} {kind.simpleString()}." if kind is not None else f"{listed(known)}.")
                )
        return replace(self, columns=tuple(field.name for field in schema.fields))


def make_source(snapshot: Snapshot, options: dict[str, Any]) -> Source:
    """The source for read options. Raises InvalidOption and QueueNotFound."""
    state: State = options["state"]
    target = None if options["queue"] is None else snapshot.find(options["queue"])
    if options["topic"] is not None and state is not State.JOURNAL:
        raise InvalidOption('format("queue") option topic', options["topic"], "absent unless state = journal")
    conditions: list[Condition] = []
    if state is State.QUEUE:
        assert target is not None
        assert target.source is not None
        table = target.source
    else:
        table = snapshot.stores[state.value]
    topic = (options["topic"] or _topic_of(target)) if state is State.JOURNAL else ""
    if topic:
        conditions.append(Condition("topic", "=", (topic,)))
    elif state in _OWNER:
        assert target is not None
        conditions.append(Condition(_OWNER[state], "=", (target.label,)))
    conditions += _filters(table, state, options)
    body = None if options["message_type"] is None else _typed_body(options["message_type"], target)
    if body is not None:
        conditions.append(Condition("headers", "contains", body.names))
    return Source(
        snapshot.databases[target.database if target is not None else snapshot.shared_database],
        table,
        _columns(table, options["columns"]),
        tuple(conditions),
        options["partitions"],
        options["fetch_size"],
        body,
        topic,
    )


def _filters(table: SourceTable, state: State, options: dict[str, Any]) -> list[Condition]:
    """The conditions of the options that say which rows are read. Raises InvalidOption if there is no such column."""
    given = [
        ("since", _TIME[state], ">="), ("until", _TIME[state], "<"), ("priority", "priority", "="),
        ("recipient", "recipient", "="), ("status", "status", "="),
    ]  # fmt: skip
    found = []
    for option, attribute, operator in given:
        value = options[option]
        if value is None:
            continue
        if attribute not in table.columns:
            raise InvalidOption(
                f'format("queue") option {option}', value, f"absent: {table.db_table} has no column {attribute}"
            )
        found.append(Condition(attribute, operator, (value,)))
    return found


def _topic_of(target: Any) -> str:
    if target.topic is None:
        raise InvalidOption(
            'format("queue") option topic', None, f"a topic: {target.label} collects several, by a regular expression"
        )
    return str(target.topic)


def _typed_body(name: str, target: Any) -> Body:
    if target is not None and target.encrypts:
        raise InvalidOption(
            'format("queue") option message_type', name, f"absent: {target.label} encrypts its bodies, and Spark has "
            "no keys"
        )  # fmt: skip
    cls = load_message_type(name)
    schema = describe(cls)
    if schema is None:
        raise InvalidOption(
            'format("queue") option message_type',
            name,
            "absent: the class has parts that no schema expresses (a __post_init__, a default that differs from row to "
            "row, a custom type); read the body as it is, and use from_json",
        )
    return Body(messages.known_as(cls), messages.type_version(cls), schema)


def _columns(table: SourceTable, given: str | None) -> tuple[str, ...]:
    names = tuple(table.columns) if given is None else tuple(name.strip() for name in given.split(","))
    unknown = [name for name in names if name not in table.columns]
    if unknown or len(set(names)) != len(names):
        raise InvalidOption(
            'format("queue") option columns', given, f"columns of these, each once: {listed(table.columns)}"
        )
    return names


@dataclass
class KeyRange(InputPartition):
    """One task: the rows with keys after one and up to another."""

    after: int
    last: int


class QueueReader(DataSourceReader):
    """``spark.read``: one table in ranges of its key."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def partitions(self) -> list[KeyRange]:
        source = self.source
        with reading(source.database) as fetch:
            bounds = spark_read_sql(source.database.vendor, source.table).bounds
            first, last = fetch(bounds, ()).to_pylist()[0].values()
        return [KeyRange(LOWEST, HIGHEST)] if first is None else ranges(first, last, source.partitions)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, KeyRange)
        return read_range(self.source, partition)


#: Beyond all keys.
LOWEST, HIGHEST = -(2**63), 2**63 - 1


def ranges(first: int, last: int, count: int) -> list[KeyRange]:
    """At most ``count`` ranges of about equal width from first to last. The outer ones are open: Spark plans a
    DataFrame once, and what it reads when it is used again may have other keys."""
    width = -(-(last - first + 1) // count)
    edges = [LOWEST, *(start - 1 for start in range(first + width, last + 1, width)), HIGHEST]
    return [KeyRange(*pair) for pair in pairwise(edges)]


def read_range(source: Source, wanted: KeyRange) -> Iterator[pa.RecordBatch]:
    """The rows of a range, a page at a time."""
    sql = spark_read_sql(source.database.vendor, source.table)
    convert = RowReader(source)
    after, last = wanted.after, wanted.last
    with reading(source.database) as fetch:
        if last == HIGHEST:
            # Of what is there now: senders may be faster than this reader.
            _, last = fetch(sql.bounds, ()).to_pylist()[0].values()
        while last is not None and after < last:
            page = fetch(
                *sql.page(convert.attributes, source.conditions, after, last, source.fetch_size)
            ).combine_chunks()
            for batch in page.to_batches():
                yield convert(batch)
            if page.num_rows < source.fetch_size:
                return
            after = page.column(0)[-1].as_py()


class RowReader:
    """Turns the rows of a statement into batches of the source's schema."""

    def __init__(self, source: Source) -> None:
        self._columns = source.columns
        self._body = source.body
        self._schema = to_arrow_schema(source.schema, timezone="UTC")
        self._class = None if source.body is None else rebuild(source.body.schema)
        #: What is read: the columns, and the headers where they say what a body is.
        extra = () if source.body is None else tuple(n for n in ("headers", "body") if n not in source.columns)
        self.attributes = (*source.columns, *extra)

    def __call__(self, batch: pa.RecordBatch, keys: int = 1) -> pa.RecordBatch:
        """``keys``: the columns before the attributes."""
        found = dict(zip(self.attributes, batch.columns[keys:], strict=True))
        if self._body is not None:
            found, bodies = self._of_type(found, self._body)
        columns = []
        for field in self._schema:
            if field.name == "body" and self._body is not None:
                columns.append(pa.array(bodies, field.type))
            else:
                columns.append(_as_type(found[field.name], field.type))
        return pa.record_batch(columns, schema=self._schema)

    def _of_type(self, found: dict[str, pa.Array], body: Body) -> tuple[dict[str, pa.Array], list[Any]]:
        """The rows of the type, and their bodies; None for one that cannot be read."""
        kept, bodies = [], []
        wanted = "body" in self._columns
        for headers, data in zip(found["headers"].to_pylist(), found["body"].to_pylist(), strict=True):
            try:
                kind = messages.read_kind(headers)
                is_kept = not set(kind.names).isdisjoint(body.names)
            except UndecodableMessage:
                is_kept = False
            kept.append(is_kept)
            if is_kept and wanted:
                bodies.append(self._read(data, kind, body))
        mask = pa.array(kept, pa.bool_())
        return {name: column.filter(mask) for name, column in found.items()}, bodies

    def _read(self, data: bytes | None, kind: messages.Kind, body: Body) -> Any:
        if kind.version != body.version:
            return None
        try:
            content_type = messages.JSON if kind.content_type == messages.BYTES else kind.content_type
            return plain_of(messages.decode_body(data, content_type, self._class), body.schema)
        except UndecodableMessage:
            return None


def _as_type(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """A column in Spark's type. A time without a zone is UTC."""
    if pa.types.is_timestamp(kind) and pa.types.is_timestamp(column.type) and column.type.tz is None:
        column = column.cast(pa.timestamp("us")).cast(pa.int64())
    return column if column.type == kind else column.cast(kind)


def reading(database: Database) -> AbstractContextManager[Fetch]:
    """A connection that reads, for a database's vendor."""
    if database.vendor == "postgresql":
        from .postgresql import reading as read_postgresql

        return read_postgresql(database)
    from .sqlserver import reading as read_sqlserver

    return read_sqlserver(database)
