"""The stream source: ``spark.readStream.format("queue").option("state", "journal")``: what is published to a topic.

    latestOffset(start)   horizon -> the last entry before it, or the ``max_rows``-th after start
    partitions(start, end) -> read: the entries after start and up to end, in order of position

An offset is the position (``txid``, ``seq``) of the last entry that was read. Bookmarks are given before transactions
commit, so "everything above the last bookmark" would skip what commits late. All entries before the horizon are there,
or never will be, so two offsets have the same entries between them whenever they are read: a replayed micro-batch is
the same one, as long as the journal's retention keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from ...errors import InvalidOption
from ...sql import spark_journal_sql
from ...sql.journal import BEGINNING, Position
from ...sql.spark import SparkJournalSql
from .options import Starting
from .readers import Fetch, RowReader, Source, reading

try:
    from pyspark.sql.streaming.datasource import ReadMaxRows, SupportsTriggerAvailableNow
except ImportError:  # Spark 4.1: every micro-batch has all that there is
    ReadMaxRows = None  # type: ignore[assignment, misc]

    class SupportsTriggerAvailableNow:  # type: ignore[no-redef]
        """Nothing to support."""


_LAST_SEQ = 2**63 - 1
_T = TypeVar("_T")


@dataclass
class PositionRange(InputPartition):
    """One task: the entries after a position and up to another."""

    after: tuple[int, int]
    last: tuple[int, int]


class JournalStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """``spark.readStream``: the journal of one topic."""

    def __init__(self, source: Source, starting: Starting, max_rows: int | None) -> None:
        if not source.topic:
            raise InvalidOption(
                'format("queue") option state', "queue", "'journal' for a stream: what other states hold is not kept"
            )
        self.source, self.starting, self.max_rows = source, starting, max_rows
        #: With Trigger.AvailableNow: what is published later is not read.
        self.target: Position | None = None
        #: Of the driver's process, which asks for the latest offset a hundred times a second.
        self._connection: tuple[ExitStack, Fetch] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_connection": None}

    def stop(self) -> None:
        if self._connection is not None:
            stack, _ = self._connection
            self._connection = None
            stack.close()

    def initialOffset(self) -> dict[str, int]:
        if self.starting is Starting.EARLIEST:
            return _offset(BEGINNING)
        return _offset(self._ask(self._last) or BEGINNING)

    def getDefaultReadLimit(self) -> Any:
        return super().getDefaultReadLimit() if self.max_rows is None else ReadMaxRows(self.max_rows)

    def latestOffset(self, start: dict[str, int] | None = None, limit: Any = None) -> dict[str, int]:
        """Spark 4.1 gives no arguments."""
        begin = BEGINNING if start is None else _position(start)
        end = self._ask(self._last) if self.target is None else self.target
        if end is None or end <= begin:
            return _offset(begin)
        if ReadMaxRows is not None and isinstance(limit, ReadMaxRows):
            last, rows = end, limit.max_rows
            end = self._ask(lambda fetch: self._after(fetch, begin, last, rows)) or end
        return _offset(end)

    def prepareForTriggerAvailableNow(self) -> None:
        self.target = self._ask(self._last) or BEGINNING

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        begin, last = _position(start), _position(end)
        if last <= begin:
            return []
        first = self._ask(lambda fetch: self._after(fetch, begin, last, 1))
        if first is None:
            return []
        # What one statement reads is not worth a second task.
        is_small = self._ask(lambda fetch: self._after(fetch, begin, last, self.source.fetch_size)) is None
        return [PositionRange(begin, last)] if is_small else _split(begin, first, last, self.source.partitions)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, PositionRange)
        return read_positions(self.source, partition)

    def _ask(self, question: Callable[[Fetch], _T]) -> _T:
        """Ask on the open connection, and on a new one if that is lost."""
        if self._connection is not None:
            try:
                return question(self._connection[1])
            except Exception:  # whatever the driver raises; the second time it is not caught
                self.stop()
        stack = ExitStack()
        fetch = stack.enter_context(reading(self.source.database))
        self._connection = stack, fetch
        return question(fetch)

    def _last(self, fetch: Fetch) -> Position | None:
        sql = self._sql()
        ((horizon,),) = (row.values() for row in fetch(sql.horizon, ()).to_pylist())
        return _first_of(fetch(*sql.last_position(self.source.topic, horizon)))

    def _after(self, fetch: Fetch, after: Position, last: Position, rows: int) -> Position | None:
        return _first_of(fetch(*self._sql().position_after(self.source.topic, after, last, rows)))

    def _sql(self) -> SparkJournalSql:
        return spark_journal_sql(self.source.database.vendor, self.source.table)


def read_positions(source: Source, wanted: PositionRange) -> Iterator[pa.RecordBatch]:
    """The entries of a range, a page at a time."""
    sql = spark_journal_sql(source.database.vendor, source.table)
    convert = RowReader(source)
    after, last = Position(*wanted.after), Position(*wanted.last)
    with reading(source.database) as fetch:
        while True:
            page = fetch(
                *sql.page_by_position(convert.attributes, source.conditions, after, last, source.fetch_size)
            ).combine_chunks()
            for batch in page.to_batches():
                yield convert(batch, keys=2)
            if page.num_rows < source.fetch_size:
                return
            after = Position(page.column(0)[-1].as_py(), page.column(1)[-1].as_py())


def _split(begin: Position, first: Position, last: Position, count: int) -> list[InputPartition]:
    """Ranges of about equal width in transactions, which are not divided: one that published much is one range."""
    width = max(1, -(-(last.txid - first.txid + 1) // count))
    ends = [Position(txid - 1, _LAST_SEQ) for txid in range(first.txid + width, last.txid + 1, width)]
    edges = [begin, *ends, last]
    return [PositionRange(*pair) for pair in pairwise(edges)]


def _first_of(found: pa.Table) -> Position | None:
    rows = found.to_pylist()
    return Position(*rows[0].values()) if rows else None


def _offset(position: Position) -> dict[str, int]:
    return position._asdict()


def _position(offset: dict[str, int]) -> Position:
    return Position(**offset)
