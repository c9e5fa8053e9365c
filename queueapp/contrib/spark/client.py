"""The sink's side of the database, the same for both vendors: stage, append, publish, clean up.

    attempt (executor)   stage()    own staging table, filled and committed in one go -> (table, rows)
    driver, success      publish()  ledger row + all winners' rows, one transaction; then drop the job's tables
    driver, failure      clean()    drop the job's tables
    job killed           -          the next job's clean() drops tables older than the retention

A killed attempt leaves nothing (PostgreSQL: CREATE TABLE and COPY are one transaction) or an orphan that no commit
message names. A driver killed after the commit leaves tables, and the ledger row that makes the replay a no-op.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import pyarrow as pa

from ...sql.spark import SparkSql, StagingName
from .columns import Plan
from .errors import SinkUnavailable, StagingLost
from .targets import Database, QueueTarget

_PUBLISH_ATTEMPTS = 6
_FIRST_PAUSE_SECONDS = 0.2
#: Micro-batches whose ledger rows are kept. Spark replays one; a checkpoint restored from a backup, maybe hundreds.
KEPT_BATCHES = 10_000
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Publication:
    """One commit: the key of its ledger row, and the winners' tables in partition order."""

    publish_id: str
    batch_id: int
    staged: Sequence[tuple[str, int]]
    streaming: bool


class SinkClient(abc.ABC):
    """One queue on one database. Cheap to make; every method opens and closes connections of its own."""

    #: Errors of the driver used on the driver node; ``is_transient`` decides which of them are worth another try.
    errors: tuple[type[Exception], ...]

    def __init__(self, database: Database, target: QueueTarget, sql: SparkSql, plan: Plan, wake_channel: str | None):
        self.database = database
        self.target = target
        self.sql = sql
        self.plan = plan
        self.wake_channel = wake_channel

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
                self.execute(connection, self.sql.probe_queue())
                if ledger:
                    self.execute(connection, self.sql.probe_ledger())
                self._clean(connection, lambda table, now: now - table.made > retention_hours * 3600)
        except self.errors as error:
            raise self.explained(error) from error

    def publish(self, publication: Publication) -> int:
        """Move all staged rows into the queue, once; returns how many were added, 0 when it was done before.

        Tried again while the connection is lost: also a commit whose answer never came is safe to repeat, because the
        ledger knows. Raises StagingLost, SinkUnavailable.
        """
        return self._with_retries(lambda: self._publish_once(publication))

    def clean(self, job: str, retention_hours: int) -> None:
        """Drop the staging tables of a finished job, and those of dead jobs."""
        with self.connect() as connection:
            self._clean(connection, lambda table, now: table.job == job or now - table.made > retention_hours * 3600)

    def wake(self) -> None:
        """Notify idle workers after the commit. A lost notification costs a peek delay, so errors are not raised."""
        if self.sql.notify is None or self.wake_channel is None:
            return
        try:
            with self.connect() as connection:
                self.execute(connection, self.sql.notify, (self.wake_channel, self.target.label))
        except SinkUnavailable:
            return
        except self.errors:
            return

    def _publish_once(self, publication: Publication) -> int:
        label = self.target.label
        rows = sum(count for _, count in publication.staged)
        with self.connect() as connection, self.transaction(connection):
            key = (label, publication.publish_id, publication.batch_id)
            added, _ = self.execute(connection, self.sql.record(), (*key, rows, len(publication.staged)))
            if added == 0:
                return 0
            self.move_all(connection, publication.staged)
            if publication.streaming and publication.batch_id > KEPT_BATCHES:
                self.execute(connection, self.sql.forget(), (*key[:2], publication.batch_id - KEPT_BATCHES))
        return rows

    @property
    def may_hold_barrier(self) -> bool:
        """Whether a row may be a barrier."""
        return "is_barrier" in self.plan.staged or self.target.table.finds_barriers

    def move_all(self, connection: Any, staged: Sequence[tuple[str, int]]) -> int:
        """Copy staged rows into the queue; returns how many. Raises StagingLost."""
        if self.target.table.barriers:
            # Before the first number is drawn; a barrier among them waits for every send that is open.
            self.execute(connection, *self.sql.fence(exclusive=self.may_hold_barrier))
        for table, count in staged:
            self._move(connection, StagingName.parse(table), count)
        return sum(count for _, count in staged)

    def _move(self, connection: Any, table: StagingName, count: int) -> None:
        plan, lifetime = self.plan, self.target.lifetime_ms
        params: list[Any] = [plan.headers for _ in plan.constants] + ([] if lifetime is None else [lifetime])
        statement = self.sql.move(table, plan.staged, plan.constants, lifetime is not None)
        try:
            moved, _ = self.execute(connection, statement, params)
        except self.errors as error:
            if self.is_missing(error):
                raise StagingLost(table.name, count, None) from error
            raise
        if moved != count:
            raise StagingLost(table.name, count, moved)

    @abc.abstractmethod
    def is_missing(self, error: Exception) -> bool:
        """Whether the error says that a table does not exist."""

    def _clean(self, connection: Any, is_dead: Callable[[StagingName, int], bool]) -> None:
        _, ((now,),) = self.execute(connection, self.sql.clock)
        _, names = self.execute(connection, self.sql.list_staging)
        for table in _readable(name for (name,) in names):
            # One by one and outside of a transaction: thousands of tables in one would exhaust the lock table.
            if is_dead(table, int(now) // 1000):
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


def _readable(names: Iterable[str]) -> Iterator[StagingName]:
    """The staging tables among the names. Other tables with the prefix are not ours and are skipped."""
    for name in names:
        try:
            yield StagingName.parse(name)
        except ValueError:
            continue
