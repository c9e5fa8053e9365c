"""The sink's side of the database, the same for both vendors: stage, append, publish, clean up.

    attempt (executor)   stage()    own staging table, filled and committed in one go -> (table, rows)
    driver, success      publish()  ledger row + all winners' rows, one transaction; then drop the job's tables
                                    (or: ledger row with the winners' names, then a transaction for each of them)
    driver, failure      clean()    drop the job's tables
    job killed           -          the next job's clean() drops tables older than the retention

A killed attempt leaves nothing (PostgreSQL: CREATE TABLE and COPY are one transaction) or an orphan that no commit
message names. A driver killed after the commit leaves tables, and the ledger row that makes the replay a no-op.
"""

from __future__ import annotations

import abc
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import msgspec
import pyarrow as pa

from ...sql.spark import DUE_AT, EVERYTHING, MARKS, Selection, SparkSql, StagingName
from .columns import Plan
from .errors import SinkUnavailable, StagingLost
from .targets import Database, QueueTarget

log = logging.getLogger("queueapp")

_PUBLISH_ATTEMPTS = 6
_FIRST_PAUSE_SECONDS = 0.2
#: Micro-batches whose ledger rows are kept. Spark replays one; a checkpoint restored from a backup, maybe hundreds.
KEPT_BATCHES = 10_000
#: How often the depth of a queue is looked at while it is too great, and how often the log says so.
_DEPTH_SECONDS = 0.5
_SAID_EVERY_SECONDS = 60
#: The payloads of ``notifier``, which is not importable without Django.
_DELAYED, _JOURNAL = "delayed", "journal"
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Publication:
    """One commit: the key of its ledger row, and the winners' tables in partition order. ``entered``: by table, how
    many rows enter each queue of a topic; ``body_bytes``: by table, the bytes of all bodies."""

    publish_id: str
    batch_id: int
    staged: Sequence[tuple[str, int]]
    streaming: bool
    entered: Mapping[str, Sequence[int]] = field(default_factory=dict)
    body_bytes: Mapping[str, int] = field(default_factory=dict)

    @property
    def parts(self) -> list[Part]:
        """The tables, with what is known of each."""
        return [
            Part(table, rows, tuple(self.entered.get(table, ())), self.body_bytes.get(table))
            for table, rows in self.staged
        ]


class Part(NamedTuple):
    """One table of a publication that is moved table by table, as JSON in ``SparkCommit.pending``."""

    table: str
    rows: int
    entered: tuple[int, ...]
    body_bytes: int | None


@dataclass(frozen=True, slots=True)
class Destination:
    """A queue that rows are moved into: its statements, and what of the rows goes there."""

    target: QueueTarget
    sql: SparkSql
    selection: Selection = EVERYTHING
    #: It gets the rows from the journal, not from this publication.
    fed: bool = False


@dataclass(frozen=True, slots=True)
class Tables:
    """The tables that all queues of a database share, by their names there."""

    delayed: str = ""
    journal: str = ""


class SinkClient(abc.ABC):
    """One queue, or the queues of one topic, on one database. Cheap to make; every method opens and closes connections
    of its own."""

    #: Errors of the driver used on the driver node; ``is_transient`` decides which of them are worth another try.
    errors: tuple[type[Exception], ...]

    #: The queues of a topic; of one queue, that.
    destinations: tuple[Destination, ...]
    #: Whether the messages of a topic are journaled.
    journaled = False
    tables = Tables()
    #: Whether a publication is one transaction. Else each of its tables is one, and outlives a crash of the server.
    atomic = True

    def __init__(
        self, database: Database, target: QueueTarget | None, sql: SparkSql, plan: Plan, wake_channel: str | None
    ) -> None:
        self.database = database
        self.sql = sql
        self.plan = plan
        self.wake_channel = wake_channel
        self.destinations = () if target is None else (Destination(target, sql),)

    @property
    def target(self) -> QueueTarget:
        """The one queue that is written to."""
        (destination,) = self.destinations
        return destination.target

    # -- on executors -----------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def stage(
        self, job: str, partition: int, attempt: int, schema: pa.Schema, batches: Iterator[pa.RecordBatch]
    ) -> tuple[str, int]:
        """Write the batches into a new staging table and commit; returns its name and how many rows it holds."""

    @abc.abstractmethod
    def append(self, job: str, partition: int, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> int:
        """Write the batches straight into the queue and commit; returns how many rows went in (at_least_once)."""

    # -- on the driver ----------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def connect(self) -> AbstractContextManager[Any]:
        """A connection outside of a transaction, closed at the end. Raises SinkUnavailable."""

    @abc.abstractmethod
    def transaction(self, connection: Any) -> AbstractContextManager[Any]:
        """Commit at the end of the block, roll back when it raises; outside of a transaction again after it."""

    @abc.abstractmethod
    def execute(self, connection: Any, sql: str, params: Sequence[Any] = ()) -> tuple[int, list[Any]]:
        """(rows touched, rows returned)."""

    @abc.abstractmethod
    def is_transient(self, error: Exception) -> bool:
        """Whether a retry may help: connection lost, deadlock victim."""

    @abc.abstractmethod
    def explained(self, error: Exception) -> Exception:
        """An error that names the remedy where it is known; else the error itself."""

    def prepare(self, retention_hours: int, *, ledger: bool) -> None:
        """Before any task: fail if a commit would fail, and drop the tables of dead jobs.

        ``ledger``: whether there will be a commit that is recorded. Raises SinkUnavailable.
        """
        try:
            with self.connect() as connection:
                for destination in self.destinations:
                    if not destination.fed:
                        self.execute(connection, destination.sql.probe_queue())
                if self.journaled:
                    self.execute(connection, self.sql.probe_insert(self.tables.journal))
                if DUE_AT in self.plan.staged:
                    self.execute(connection, self.sql.probe_insert(self.tables.delayed))
                if ledger:
                    self.execute(connection, self.sql.probe_ledger())
                self._clean(connection, lambda table, now: now - table.made > retention_hours * 3600)
        except self.errors as error:
            raise self.explained(error) from error

    def publish(self, publication: Publication) -> int:
        """Move all staged rows into the queue, once; returns how many were added, 0 when it was done before. Where it
        is not atomic, what an earlier run with its id has left is moved, and no other rows are.

        Tried again while the connection is lost: also a commit whose answer never came is safe to repeat, because the
        ledger knows. Raises StagingLost, SinkUnavailable.
        """
        if self.atomic:
            return self._with_retries(lambda: self._publish_once(publication))
        self._with_retries(lambda: self._begin(publication))
        key, added = (self.plan.label, publication.publish_id, publication.batch_id), 0
        while (moved := self._with_retries(lambda: self._move_next(key))) is not None:
            added += moved
        return added

    def clean(self, job: str, retention_hours: int) -> None:
        """Drop the staging tables of a finished job, and those of dead jobs."""
        with self.connect() as connection:
            self._clean(connection, lambda table, now: table.job == job or now - table.made > retention_hours * 3600)

    def wake(self) -> None:
        """Notify idle workers, and the dispatcher and the journal service where they have to do with it, after the
        commit. A lost notification costs a peek delay, so errors are not raised."""
        if self.sql.notify is None or self.wake_channel is None:
            return
        payloads = [_JOURNAL if destination.fed else destination.target.label for destination in self.destinations]
        payloads += [_DELAYED] if DUE_AT in self.plan.staged else []
        try:
            with self.connect() as connection:
                for payload in dict.fromkeys(payloads):
                    self.execute(connection, self.sql.notify, (self.wake_channel, payload))
        except SinkUnavailable:
            return
        except self.errors:
            return

    def wait_for_room(self, max_depth: int) -> None:
        """Return when each queue has fewer than ``max_depth`` messages. Raises SinkUnavailable."""
        waited = 0.0
        while full := self._with_retries(lambda: self._full(max_depth)):
            if waited % _SAID_EVERY_SECONDS == 0:
                log.info(
                    "%s waits until fewer than %d messages are in %s (max_depth).", self.plan.label, max_depth, full
                )
            time.sleep(_DEPTH_SECONDS)
            waited += _DEPTH_SECONDS

    def _full(self, limit: int) -> str:
        """A queue that has so many messages; '' if none has."""
        with self.connect() as connection:
            for destination in self.destinations:
                if destination.fed:
                    continue  # it has a target depth of its own
                _, ((depth,),) = self.execute(connection, destination.sql.depth(), (limit,))
                if depth >= limit:
                    return destination.target.label
        return ""

    def _publish_once(self, publication: Publication) -> int:
        label = self.plan.label
        rows = sum(count for _, count in publication.staged)
        with self.connect() as connection, self.transaction(connection):
            key = (label, publication.publish_id, publication.batch_id)
            added, _ = self.execute(connection, self.sql.record(), (*key, rows, len(publication.staged)))
            if added == 0:
                _, ((known,),) = self.execute(connection, self.sql.recorded_rows(), key)
                if known != rows:
                    log.warning(
                        "%s: publication %s, batch %d, was committed with %d rows and is not published again; this job "
                        "has %d rows. Two jobs or copies of a checkpoint have one id, or the source was read "
                        "differently.", label, *key[1:], known, rows,
                    )  # fmt: skip
                return 0
            self.move_all(connection, publication.staged, publication.entered, publication.body_bytes)
            if publication.streaming and publication.batch_id > KEPT_BATCHES:
                self.execute(connection, self.sql.forget(), (*key[:2], publication.batch_id - KEPT_BATCHES))
        return rows

    def _begin(self, publication: Publication) -> None:
        """Record a publication whose tables are moved one by one, unless it is recorded."""
        key, rows = (self.plan.label, publication.publish_id, publication.batch_id), publication.parts
        with self.connect() as connection, self.transaction(connection):
            given = (*key, sum(part.rows for part in rows), len(rows))
            added, _ = self.execute(connection, self.sql.record(), given)
            if added:
                self.execute(connection, self.sql.set_pending(), (_json_of(rows) if rows else None, *key))
                if publication.streaming and publication.batch_id > KEPT_BATCHES:
                    self.execute(connection, self.sql.forget(), (*key[:2], publication.batch_id - KEPT_BATCHES))

    def _move_next(self, key: tuple[str, str, int]) -> int | None:
        """Move the next table of a publication; returns how many rows it has, None when there is no table."""
        with self.connect() as connection:
            with self.transaction(connection):
                _, ((pending,),) = self.execute(connection, self.sql.lock_pending(), key)
                if not pending:
                    return None
                part, *rest = _parts_of(pending)
                sizes = {} if part.body_bytes is None else {part.table: part.body_bytes}
                try:
                    self.move_all(connection, [(part.table, part.rows)], {part.table: part.entered}, sizes)
                except StagingLost as error:
                    raise error.of_part() from error
                self.execute(connection, self.sql.set_pending(), (_json_of(rest) if rest else None, *key))
            self.execute(connection, self.sql.drop_staging(StagingName.parse(part.table)))
        return part.rows

    def may_hold_barrier(self, target: QueueTarget) -> bool:
        """Whether a row may be a barrier in this queue."""
        return "is_barrier" in self.plan.staged or target.table.finds_barriers

    def move_all(
        self,
        connection: Any,
        staged: Sequence[tuple[str, int]],
        entered: Mapping[str, Sequence[int]] | None = None,
        body_bytes: Mapping[str, int] | None = None,
    ) -> int:
        """Copy staged rows into the queue, or into the journal and the queues of the topic; returns how many. Raises
        StagingLost."""
        for destination in self.destinations:
            if destination.target.table.barriers and not destination.fed:
                # Before the first number is drawn; a barrier among them waits for every send that is open.
                exclusive = self.may_hold_barrier(destination.target)
                self.execute(connection, *destination.sql.fence(exclusive=exclusive))
        for table, count in staged:
            name = StagingName.parse(table)
            try:
                self._check_bytes(connection, name, (body_bytes or {}).get(table))
                self._move(connection, name, count, (entered or {}).get(table))
            except self.errors as error:
                if self.is_missing(error):
                    raise StagingLost(table, count, None) from error
                raise
        return sum(count for _, count in staged)

    def _move(self, connection: Any, table: StagingName, count: int, entered: Sequence[int] | None) -> None:
        plan = self.plan
        if self.journaled:
            # First, as publishers do: in the opposite order two of them could wait for each other.
            kept = tuple(name for name in plan.stored if name in plan.staged or name == MARKS)
            values: list[Any] = [plan.topic] + ([] if MARKS in kept else [plan.marks()])
            statement = self.sql.move_to_journal(table, self.tables.journal, kept, plan.constants)
            self._compare(table, count, connection, (statement, [*values, *(plan.headers for _ in plan.constants)]))
        for number, destination in enumerate(self.destinations):
            if not destination.fed:
                expected = entered[number] if entered else count
                self._compare(table, expected, connection, *self._moves(table, destination))

    def _moves(self, table: StagingName, destination: Destination) -> list[tuple[str, list[Any]]]:
        """The statements that move a table into one queue, and those of its rows that are delayed."""
        plan, target, selection = self.plan, destination.target, destination.selection
        attributes = tuple(dict.fromkeys((*plan.staged, *selection.renamed)))
        if plan.topic is not None:
            attributes = tuple(name for name in attributes if target.table.has(name))
        constants = tuple(name for name in plan.constants if name not in attributes)
        lifetime = target.lifetime_ms
        params: list[Any] = [plan.headers for _ in constants] + ([] if lifetime is None else [lifetime])
        shape = (attributes, constants, lifetime is not None)
        moves = [(destination.sql.move(table, *shape, selection), params)]
        if DUE_AT in attributes:
            moves.append((destination.sql.move_delayed(table, self.tables.delayed, *shape), [target.label, *params]))
        return moves

    def _compare(self, table: StagingName, expected: int, connection: Any, *moves: tuple[str, list[Any]]) -> None:
        moved = sum(self.execute(connection, statement, params)[0] for statement, params in moves)
        if moved != expected:
            raise StagingLost(table.name, expected, moved)

    def _check_bytes(self, connection: Any, table: StagingName, expected: int | None) -> None:
        """Beside the number of rows: what their bodies are together, so that none was cut or replaced."""
        if expected is None:
            return
        _, ((found,),) = self.execute(connection, self.sql.staged_bytes(table))
        # The rows say more when there are none.
        if found != expected and found:
            raise StagingLost(table.name, expected, found, "bytes of bodies")

    @abc.abstractmethod
    def is_missing(self, error: Exception) -> bool:
        """Whether the error says that a table does not exist."""

    def _clean(self, connection: Any, is_dead: Callable[[StagingName, int], bool]) -> None:
        _, ((now,),) = self.execute(connection, self.sql.clock)
        _, names = self.execute(connection, self.sql.list_staging)
        dead = [table for table in _readable(name for (name,) in names) if is_dead(table, int(now) // 1000)]
        if not dead:
            return
        _, rows = self.execute(connection, self.sql.list_pending())
        waiting = {part.table for (pending,) in rows for part in _parts_of(pending)}
        for table in dead:
            # One by one and outside of a transaction: thousands of tables in one would exhaust the lock table.
            if table.name not in waiting:
                self.execute(connection, self.sql.drop_staging(table))

    def _with_retries(self, action: Callable[[], _T]) -> _T:
        pause = _FIRST_PAUSE_SECONDS
        for attempt in range(1, _PUBLISH_ATTEMPTS + 1):
            try:
                return action()
            except SinkUnavailable:
                if attempt == _PUBLISH_ATTEMPTS:
                    raise
            except self.errors as error:
                if attempt == _PUBLISH_ATTEMPTS or not self.is_transient(error):
                    raise self.explained(error) from error
            time.sleep(pause)
            pause *= 2
        raise AssertionError("unreachable")


def _json_of(parts: Sequence[Part]) -> str:
    return msgspec.json.encode(parts).decode()


def _parts_of(pending: str) -> list[Part]:
    return msgspec.json.decode(pending, type=list[Part])


def _readable(names: Iterable[str]) -> Iterator[StagingName]:
    """The staging tables among the names. Other tables with the prefix are not ours and are skipped."""
    for name in names:
        try:
            yield StagingName.parse(name)
        except ValueError:
            continue
