"""The sink's writers: what Spark calls on executors (``write``) and on the driver (``commit``, ``abort``).

    batch      writer() -> prepare -> write per task attempt -> commit(winners)            | abort(winners or None)
    streaming  the same per micro-batch, without prepare; commit and abort also get the batch's number

Spark makes the writer in one process, pickles it, and calls each method in another: nothing but what is in the fields
survives. ``write`` may run several times for a partition; ``commit`` gets exactly one message per partition.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from ...errors import InvalidOption
from ...sql import spark_sql
from ...sql.spark import DUE_AT, PreparedName, SparkSql
from .client import Destination, Publication, SinkClient, Tables
from .columns import Plan, make_plan, make_topic_plan
from .encoding import RowEncoder
from .errors import SparkSinkError
from .options import Guarantee
from .targets import Database, QueueTarget, Snapshot, Topic

log = logging.getLogger("queueapp")

#: Spark sets these for the tasks of a micro-batch. The id is kept in the checkpoint, so it survives a restart, and a
#: new checkpoint, whose batches start from 0 again, has another one.
_QUERY_ID = "sql.streaming.queryId"
_BATCH_ID = "streaming.sql.batchId"


@dataclass(frozen=True)
class Staged(WriterCommitMessage):
    """What one task attempt did: rows in ``table`` (None: no rows, or written straight into the queue)."""

    partition: int
    table: str | None
    rows: int
    query_id: str | None = None
    #: Rows that the queue's filter does not match: they are in no table.
    refused: int = 0
    #: Of a topic: rows that enter each of its queues.
    entered: tuple[int, ...] = ()
    body_bytes: int = 0
    #: The number of a prepared transaction, whose identifier is in ``table``.
    number: int = 0


@dataclass(frozen=True)
class Sink:
    """One write job or streaming query on one queue or topic: all that its processes have to know."""

    database: Database
    target: QueueTarget | Topic
    ledger: Any
    plan: Plan
    wake_channel: str | None
    guarantee: Guarantee
    retention_hours: int
    max_depth: int | None = None
    atomic: bool = True
    two_phase: bool = False
    tables: Tables = field(default_factory=Tables)

    def client(self) -> SinkClient:
        vendor, target = self.database.vendor, self.target
        if isinstance(target, Topic):
            sql = spark_sql(vendor, None, self.ledger)
            client = make_client(self.database, None, sql, self.plan, self.wake_channel)
            client.destinations = tuple(
                Destination(queue, spark_sql(vendor, queue.table, self.ledger), route.selection, route.fed)
                for queue, route in zip(target.queues, self.plan.routes, strict=True)
            )
            client.journaled = target.journaled
        else:
            sql = spark_sql(vendor, target.table, self.ledger)
            client = make_client(self.database, target, sql, self.plan, self.wake_channel)
        client.tables = self.tables
        client.atomic = self.atomic and not self.two_phase
        client.two_phase = self.two_phase
        return client

    def publication(self, publish_id: str, batch_id: int) -> str:
        """The digest of a publication in the identifiers of its prepared transactions; '' where it has none."""
        return _digest(self.target.label, publish_id, batch_id) if self.two_phase else ""

    def write(self, job: str, publish_id: str, batch_id: int, batches: Iterator[pa.RecordBatch]) -> Staged:
        """Encode and store one task attempt's rows; called on an executor."""
        context = TaskContext.get()
        assert context is not None
        message = Staged(context.partitionId(), None, 0, context.getLocalProperty(_QUERY_ID))
        encoder, source = RowEncoder(self.plan), (batch for batch in batches if batch.num_rows)
        encoded = (batch for batch in map(encoder.encode, source) if batch.num_rows)
        first = next(encoded, None)
        if first is None:
            return replace(message, refused=encoder.refused)
        whole, client = chain([first], encoded), self.client()
        if self.max_depth is not None and self._writes_into_queue:
            client.wait_for_room(self.max_depth)
        if self.guarantee is Guarantee.AT_LEAST_ONCE:
            rows = client.append(job, context.partitionId(), encoder.schema, whole)
            return replace(message, rows=rows, refused=encoder.refused)
        if self.two_phase:
            publication = self.publication(publish_id, batch_id)
            name = PreparedName.make(publication, job, context.partitionId(), context.attemptNumber())
            rows, number = client.append_prepared(
                name, (self.target.label, publish_id, batch_id), encoder.schema, whole
            )
            gid = name.gid if rows else None
            return replace(message, table=gid, rows=rows, number=number, refused=encoder.refused)
        table, rows = client.stage(job, context.partitionId(), context.attemptNumber(), encoder.schema, whole)
        return replace(
            message, table=table, rows=rows, refused=encoder.refused, entered=tuple(encoder.entered),
            body_bytes=encoder.body_bytes,
        )  # fmt: skip

    @property
    def _writes_into_queue(self) -> bool:
        return self.two_phase or self.guarantee is Guarantee.AT_LEAST_ONCE

    def commit(self, job: str, publish_id: str, batch_id: int, streaming: bool, staged: Sequence[Staged]) -> None:
        """Publish the winners' rows and clear the staging away; called on the driver."""
        client = self.client()
        if refused := sum(message.refused for message in staged):
            log.info("%s: %d rows do not match its filter and were left out.", self.target.label, refused)
        if self.guarantee is Guarantee.EXACTLY_ONCE:
            winners = [(m.table, m.rows) for m in sorted(staged, key=lambda m: m.partition) if m.table is not None]
            if not winners and streaming and client.atomic:
                return
            entered = {m.table: m.entered for m in staged if m.table is not None and m.entered}
            if self.max_depth is not None and winners and not self._writes_into_queue:
                client.wait_for_room(self.max_depth)
            body_bytes = {m.table: m.body_bytes for m in staged if m.table is not None and not self.two_phase}
            numbers = {m.table: m.number for m in staged if m.table is not None and self.two_phase}
            added = client.publish(Publication(publish_id, batch_id, winners, streaming, entered, body_bytes, numbers))
            self.clean(client, job, self.publication(publish_id, batch_id))
        else:
            added = sum(message.rows for message in staged)
        if added:
            client.wake()

    def clean(self, client: SinkClient, job: str, recorded: str = "") -> None:
        """Drop the job's staging tables, and roll back what it has prepared and what others have for the publication
        that is ``recorded``. What fails here is done after the retention by the next job."""
        with suppress(SparkSinkError, *client.errors):
            client.clean(job, self.retention_hours, recorded)


def make_sink(snapshot: Snapshot, schema: StructType, options: dict[str, Any]) -> Sink:
    """The sink for read options. Raises InvalidOption, InvalidDataFrame and QueueNotFound."""
    guarantee, target = options["delivery"], options["queue"] and snapshot.find(options["queue"])
    if options["topic"] is not None:
        if target is not None:
            raise InvalidOption('format("queue") option topic', options["topic"], "absent where option queue is given")
        target = snapshot.route(options["topic"])
        plan = make_topic_plan(target, schema, options["message_type"])
    else:
        plan = make_plan(target, schema, options["message_type"])
    if guarantee is not Guarantee.EXACTLY_ONCE and (plan.topic is not None or DUE_AT in plan.staged):
        raise InvalidOption(
            'format("queue") option delivery', guarantee.value, f"exactly_once for a topic, and with a column {DUE_AT}"
        )
    if guarantee is not Guarantee.EXACTLY_ONCE and not options["atomic"]:
        raise InvalidOption('format("queue") option atomic', False, "true, or absent, with delivery = at_least_once")
    database = snapshot.databases[target.database]
    if options["two_phase"]:
        _check_two_phase(database, target, plan, options)
    stores = {state: table.db_table for state, table in snapshot.stores.items()}
    return Sink(
        database=database,
        target=target,
        ledger=snapshot.ledger,
        plan=plan,
        wake_channel=snapshot.wake_channel,
        guarantee=guarantee,
        retention_hours=options["staging_retention_hours"],
        max_depth=options["max_depth"],
        atomic=options["atomic"],
        two_phase=options["two_phase"],
        tables=Tables(stores.get("delayed", ""), stores.get("journal", "")),
    )


def _check_two_phase(database: Database, target: QueueTarget | Topic, plan: Plan, options: dict[str, Any]) -> None:
    """Raise InvalidOption where the transactions of tasks cannot be prepared, or should not."""
    reasons = {
        "on SQL Server, which has no prepared transactions": database.vendor != "postgresql",
        "with delivery = at_least_once": options["delivery"] is not Guarantee.EXACTLY_ONCE,
        "with atomic = false, which it implies": not options["atomic"],
        f"for a topic, and with a column {DUE_AT}": plan.topic is not None or DUE_AT in plan.staged,
        # A task that waits for a barrier would wait for the prepared transactions of others, and these for it.
        "on a queue with barriers": isinstance(target, QueueTarget) and target.table.barriers,
    }
    for reason, holds in reasons.items():
        if holds:
            raise InvalidOption('format("queue") option two_phase', True, f"false, or absent, {reason}")


class BatchWriter(DataSourceArrowWriter):
    """``df.write``: one job, one publication."""

    def __init__(self, sink: Sink, publish_id: str | None) -> None:
        self.sink = sink
        self.job = secrets.token_hex(8)
        self.publish_id = publish_id or f"job-{self.job}"
        if publish_id is not None and sink.guarantee is not Guarantee.EXACTLY_ONCE:
            raise InvalidOption('format("queue") option publish_id', publish_id, "absent with delivery = at_least_once")
        sink.client().prepare(
            sink.retention_hours,
            ledger=sink.guarantee is Guarantee.EXACTLY_ONCE,
            publication=sink.publication(self.publish_id, 0),
            publish_id=publish_id if sink.two_phase and publish_id else "",
        )

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        return self.sink.write(self.job, self.publish_id, 0, iterator)

    def commit(self, messages: list[Any]) -> None:
        self.sink.commit(self.job, self.publish_id, 0, False, messages)

    def abort(self, messages: list[Any]) -> None:
        if self.sink.guarantee is Guarantee.EXACTLY_ONCE:
            self.sink.clean(self.sink.client(), self.job)


class StreamWriter(DataSourceStreamArrowWriter):
    """``df.writeStream``: one publication per micro-batch."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        context = TaskContext.get()
        assert context is not None
        query_id, batch_id = context.getLocalProperty(_QUERY_ID), context.getLocalProperty(_BATCH_ID)
        if query_id is None or batch_id is None:
            raise SparkSinkError(
                "Spark did not name the streaming query and micro-batch of this task, so exactly_once cannot be kept."
            )
        return self.sink.write(_digest(query_id, batch_id), query_id, int(batch_id), iterator)

    def commit(self, messages: list[Any], batchId: int) -> None:
        query_ids = {message.query_id for message in messages}
        if not query_ids:
            return
        (query_id,) = query_ids
        self.sink.commit(_digest(query_id, batchId), query_id, batchId, True, messages)

    def abort(self, messages: list[Any], batchId: int) -> None:
        # Spark does not say which query it is when no task succeeded; then the retention clears away what there is.
        for query_id in {message.query_id for message in messages if message is not None}:
            self.sink.clean(self.sink.client(), _digest(query_id, batchId))


def _digest(*names: Any) -> str:
    """The same name for every run of a micro-batch, so that its replay clears away what the first run left."""
    return hashlib.blake2b("/".join(map(str, names)).encode(), digest_size=8).hexdigest()


def make_client(
    database: Database, target: QueueTarget | None, sql: SparkSql, plan: Plan, wake_channel: str | None
) -> SinkClient:
    """The client for a database's vendor."""
    if database.vendor == "postgresql":
        from .postgresql import PostgresqlClient

        return PostgresqlClient(database, target, sql, plan, wake_channel)
    from .sqlserver import SqlServerClient

    return SqlServerClient(database, target, sql, plan, wake_channel)
