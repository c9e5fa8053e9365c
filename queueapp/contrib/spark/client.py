"""The sink's side of the database, the same for both vendors: stage, append, publish, clean up.

    attempt (executor)   stage()    own staging table, filled and committed in one go -> (table, rows)
                                    (or: COPY into the queue, its transaction prepared and not committed)
    driver, success      publish()  ledger row + all winners' rows, one transaction; then drop the job's tables
                                    (or: ledger row with the winners' names, then a transaction for each of them)
    driver, failure      clean()    drop the job's tables, roll back what it has prepared
    job killed           -          the next job's clean() does that to what is older than the retention

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

from ...sql.spark import DUE_AT, EVERYTHING, MARKS, PreparedName, Selection, SparkSql, StagingName
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
    many rows enter each queue of a topic; ``body_bytes``: by table, the bytes of all bodies. With ``two_phase``
    prepared transactions in place of tables; ``numbers`` are those that the server gave them."""

    publish_id: str
    batch_id: int
    staged: Sequence[tuple[str, int]]
    streaming: bool
    entered: Mapping[str, Sequence[int]] = field(default_factory=dict)
    body_bytes: Mapping[str, int] = field(default_factory=dict)
    numbers: Mapping[str, int] = field(default_factory=dict)

    @property
    def parts(self) -> list[Part]:
        """The tables, with what is known of each."""
        return [
            Part(table, rows, tuple(self.entered.get(table, ())), self.body_bytes.get(table), self.numbers.get(table))
            for table, rows in self.staged
        ]


class Part(NamedTuple):
    """One table, or prepared transaction, of a publication that is moved one by one, as JSON in
    ``SparkCommit.pending``."""

    table: str
    rows: int
    entered: tuple[int, ...] = ()
    body_bytes: int | None = None
    #: Of a prepared transaction: its number, by which the server knows how it ended.
    number: int | None = None

    @property
    def prepared(self) -> PreparedName | None:
        """The prepared transaction; None for a table."""
        return PreparedName.find(self.table)


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
    #: Whether attempts prepare their transactions.
    two_phase = False
    #: Whether the database can prepare transactions. What follows of them is called on no other.
    prepares = False

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

    def append_prepared(
        self, name: PreparedName, key: tuple[str, str, int], schema: pa.Schema, batches: Iterator[pa.RecordBatch]
    ) -> tuple[int, int]:
        """Write the batches straight into the queue and prepare the transaction; returns (rows, its number). No rows
        when the publication of this ``key`` (queue, publish_id, batch_id) is recorded by now: this attempt is late."""
        raise NotImplementedError

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

    def check_two_phase(self, connection: Any) -> None:
        """Raise SinkUnavailable where the server prepares no transactions."""
        raise NotImplementedError

    def check_prepared(self, connection: Any, parts: Sequence[Part]) -> None:
        """Keep janitors away until the end of this transaction, and raise StagingLost where one of these prepared
        transactions is gone."""
        raise NotImplementedError

    def commit_prepared(self, part: Part) -> None:
        """Commit a prepared transaction, unless an earlier try did. Raises StagingLost when it was rolled back."""
        raise NotImplementedError

    def roll_back_prepared(self, connection: Any, is_dead: Callable[[PreparedName, float], bool]) -> None:
        """Roll back the prepared transactions of dead jobs that no ledger row names. ``is_dead``: gets the seconds
        since it was prepared."""
        raise NotImplementedError

    def prepare(self, retention_hours: int, *, ledger: bool, publication: str = "", publish_id: str = "") -> None:
        """Before any task: fail if a commit would fail, and drop the tables of dead jobs.

        ``ledger``: whether there will be a commit that is recorded. ``publish_id``: of a publication in two phases,
        which an earlier job may have begun: what that has recorded is committed, what it has not is rolled back, since
        either would take the places of this one's transactions. Raises SinkUnavailable.
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
                if self.two_phase:
                    self.check_two_phase(connection)
                self._clean(connection, lambda table, now: now - table.made > retention_hours * 3600)
                if publish_id:
                    self._move_pending((self.plan.label, publish_id, 0))
                if ledger:
                    self._roll_back(connection, retention_hours, publication=publication)
        except self.errors as error:
            raise self.explained(error) from error

    def publish(self, publication: Publication) -> int:
        """Move all staged rows into the queue, once; returns how many were added, 0 when it was done before. Where it
        is not atomic, what an earlier run with its id has left is moved, and no other rows are.

        Tried again while the connection is lost: also a commit whose answer never came is safe to repeat, because the
        ledger knows. Raises StagingLost, SinkUnavailable.
        """
        if self.atomic:
            added = self._with_retries(lambda: self._publish_once(publication))
            if added is not None:
                return added
        else:
            self._with_retries(lambda: self._begin(publication))
        return self._move_pending((self.plan.label, publication.publish_id, publication.batch_id))

    def clean(self, job: str, retention_hours: int, publication: str = "") -> None:
        """Drop the staging tables of a finished job, and those of dead jobs; roll back what they have prepared.
        ``publication``: it is recorded, so what other jobs have prepared for it never will be."""
        with self.connect() as connection:
            self._clean(connection, lambda table, now: table.job == job or now - table.made > retention_hours * 3600)
            self._roll_back(connection, retention_hours, job, publication)

    def _roll_back(self, connection: Any, retention_hours: int, job: str = "", publication: str = "") -> None:
        def is_dead(name: PreparedName, age: float) -> bool:
            return name.job == job or name.publication == publication or age > retention_hours * 3600

        if self.prepares:
            self.roll_back_prepared(connection, is_dead)

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

    def _publish_once(self, publication: Publication) -> int | None:
        """Returns how many rows were added, None when an earlier job that was not atomic has left some to be moved."""
        label = self.plan.label
        rows = sum(count for _, count in publication.staged)
        with self.connect() as connection, self.transaction(connection):
            key = (label, publication.publish_id, publication.batch_id)
            added, _ = self.execute(connection, self.sql.record(), (*key, rows, len(publication.staged)))
            if added == 0:
                _, ((known, pending),) = self.execute(connection, self.sql.recorded(), key)
                if known != rows:
                    log.warning(
                        "%s: publication %s, batch %d, was committed with %d rows and is not published again; this job "
                        "has %d rows. Two jobs or copies of a checkpoint have one id, or the source was read "
                        "differently.", label, *key[1:], known, rows,
                    )  # fmt: skip
                return None if pending else 0
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
                if found := [part for part in rows if part.prepared is not None]:
                    self.check_prepared(connection, found)
                self.execute(connection, self.sql.set_pending(), (_json_of(rows) if rows else None, *key))
                if publication.streaming and publication.batch_id > KEPT_BATCHES:
                    self.execute(connection, self.sql.forget(), (*key[:2], publication.batch_id - KEPT_BATCHES))

    def _move_pending(self, key: tuple[str, str, int]) -> int:
        """Move what is left of a publication that is recorded; returns how many rows."""
        added = 0
        while (moved := self._with_retries(lambda: self._move_next(key))) is not None:
            added += moved
        return added

    def _move_next(self, key: tuple[str, str, int]) -> int | None:
        """Move the next table of a publication, or commit its next prepared transaction; returns how many rows it has,
        None when nothing is left."""
        with self.connect() as connection:
            with self.transaction(connection):
                _, found = self.execute(connection, self.sql.lock_pending(), key)
                if not found or not found[0][0]:
                    return None
                part, *rest = _parts_of(found[0][0])
                sizes = {} if part.body_bytes is None else {part.table: part.body_bytes}
                try:
                    if part.prepared is not None:
                        self.commit_prepared(part)
                    else:
                        self.move_all(connection, [(part.table, part.rows)], {part.table: part.entered}, sizes)
                except StagingLost as error:
                    raise error.of_part() from error
                self.execute(connection, self.sql.set_pending(), (_json_of(rest) if rest else None, *key))
            if part.prepared is None:
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
            moves = [(statement, [*values, *(plan.headers for _ in plan.constants)])]
            self._move_pieces(connection, table, count, count, moves)
        for number, destination in enumerate(self.destinations):
            if not destination.fed:
                expected = entered[number] if entered else count
                self._move_pieces(connection, table, count, expected, self._moves(table, destination))

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

    def _move_pieces(
        self, connection: Any, table: StagingName, rows: int, expected: int, moves: Sequence[tuple[str, list[Any]]]
    ) -> None:
        """Execute statements of ``_moves`` for each piece of a table that holds so many rows. Raises StagingLost unless
        ``expected`` rows were moved in all."""
        moved = sum(
            self.execute(connection, statement, (*params, *piece))[0]
            for statement, params in moves
            for piece in self.sql.pieces(rows)
        )
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
        waiting = self.waiting(connection)
        for table in dead:
            # One by one and outside of a transaction: thousands of tables in one would exhaust the lock table.
            if table.name not in waiting:
                self.execute(connection, self.sql.drop_staging(table))

    def waiting(self, connection: Any) -> set[str]:
        """The tables and prepared transactions of publications that are recorded and not moved."""
        _, rows = self.execute(connection, self.sql.list_pending())
        return {part.table for (pending,) in rows for part in _parts_of(pending)}

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
