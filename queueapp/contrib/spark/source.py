"""The data source ``queue``: what Spark asks for a writer. The reader has its place here."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from typing import Any, ClassVar

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from ...errors import InvalidOption
from .columns import make_plan
from .options import read_options
from .targets import Snapshot, snapshot_of_settings
from .writers import BatchWriter, Sink, StreamWriter, make_sink

NAME = "queue"


class QueueDataSource(DataSource):
    """``format("queue")``. Register it with ``queueapp.contrib.spark.register``, which gives it the project's
    queues."""

    #: Set on the subclass that ``register`` makes. That class is pickled by value, so this is how the queues' tables
    #: and the connection parameters reach Spark's processes.
    snapshot: ClassVar[Snapshot | None] = None

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)

    @classmethod
    def name(cls) -> str:
        return NAME

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
        sink, options = self._sink(schema, overwrite)
        return BatchWriter(sink, options["publish_id"])

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:
        sink, options = self._sink(schema, overwrite)
        if options["publish_id"] is not None:
            raise InvalidOption(
                'format("queue") option publish_id',
                options["publish_id"],
                "absent: a streaming query has an id of its own",
            )
        return StreamWriter(sink)

    def _sink(self, schema: StructType, overwrite: bool) -> tuple[Sink, dict[str, Any]]:
        if overwrite:
            raise InvalidOption('format("queue") mode', "overwrite", "append: a queue is not replaced by a write")
        options = read_options(self.options)
        snapshot = self.snapshot or snapshot_of_settings()
        if snapshot.settings_module:
            os.environ.setdefault("DJANGO_SETTINGS_MODULE", snapshot.settings_module)
        target = snapshot.find(options["queue"])
        return make_sink(snapshot, target, make_plan(target, schema, options["message_type"]), options), options


def with_snapshot(snapshot: Snapshot) -> type[QueueDataSource]:
    """A data source class that carries the snapshot. Not importable under its name, so it is pickled by value."""
    return type("QueueDataSource", (QueueDataSource,), {"snapshot": snapshot, "__module__": __name__})
