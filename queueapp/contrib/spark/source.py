"""The data source ``queue``: what Spark asks for a writer or a reader."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from typing import Any, ClassVar

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from ...errors import InvalidOption
from .options import READ_OPTIONS, STREAM_OPTIONS, read_options
from .readers import QueueReader, Source, make_source
from .streams import JournalStreamReader
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

    def schema(self) -> StructType:
        return self._source().schema

    def reader(self, schema: StructType) -> QueueReader:
        return QueueReader(self._source().reduced_to(schema))

    def streamReader(self, schema: StructType) -> JournalStreamReader:
        options = read_options(self.options, STREAM_OPTIONS)
        source = make_source(self._snapshot(), options).reduced_to(schema)
        return JournalStreamReader(source, options["starting"], options["max_rows"])

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

    def _source(self) -> Source:
        # Spark asks for the schema of a stream in the same words as for that of a batch.
        streaming = {option.name for option in STREAM_OPTIONS} - {option.name for option in READ_OPTIONS}
        given = {name: value for name, value in self.options.items() if name.lower() not in streaming}
        return make_source(self._snapshot(), read_options(given, READ_OPTIONS))

    def _snapshot(self) -> Snapshot:
        snapshot = self.snapshot or snapshot_of_settings()
        if snapshot.settings_module:
            os.environ.setdefault("DJANGO_SETTINGS_MODULE", snapshot.settings_module)
        return snapshot

    def _sink(self, schema: StructType, overwrite: bool) -> tuple[Sink, dict[str, Any]]:
        if overwrite:
            raise InvalidOption('format("queue") mode', "overwrite", "append: a queue is not replaced by a write")
        options = read_options(self.options)
        return make_sink(self._snapshot(), schema, options), options


def with_snapshot(snapshot: Snapshot) -> type[QueueDataSource]:
    """A data source class that carries the snapshot. Not importable under its name, so it is pickled by value."""
    return type("QueueDataSource", (QueueDataSource,), {"snapshot": snapshot, "__module__": __name__})
