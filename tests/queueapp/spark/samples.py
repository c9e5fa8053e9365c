"""Message classes and failing sinks, importable by Spark's Python workers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import msgspec
from pyspark import TaskContext
from pyspark.sql.types import StructType

from queueapp.spark.source import QueueDataSource
from queueapp.spark.targets import Snapshot
from queueapp.spark.writers import BatchWriter


class Part(msgspec.Struct):
    name: str
    count: int


class Shipped(msgspec.Struct, rename="camel", tag="shipped"):
    """Every kind of field, under other names in JSON than in Python."""

    order_number: int
    shipped_at: datetime
    day: date
    price: Decimal
    weight: float
    is_gift: bool
    parts: list[Part]
    labels: dict[str, str]
    note: str | None = None


@dataclasses.dataclass
class Counted:
    number: int
    text: str = "none"


def failing_source(snapshot: Snapshot, kind: str) -> type[QueueDataSource]:
    """A data source "failing_queue" whose write misbehaves in the way of ``kind``."""
    return type("FailingSource", (FailingSource,), {"snapshot": snapshot, "kind": kind, "__module__": __name__})


class FailingSource(QueueDataSource):
    kind = ""

    @classmethod
    def name(cls) -> str:
        return "failing_queue"

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
        writer = super().writer(schema, overwrite)
        return FailingWriter(writer, self.kind)


class FailingWriter(BatchWriter):
    def __init__(self, writer: BatchWriter, kind: str) -> None:
        self.__dict__.update(writer.__dict__)
        self.kind = kind

    def write(self, iterator: Iterator[Any]) -> Any:
        context = TaskContext.get()
        assert context is not None
        batches = list(iterator)
        if self.kind == "duplicate":
            # A speculative attempt that ends too, and is not the one whose message Spark keeps.
            super().write(iter(batches))
        message = super().write(iter(batches))
        if self.kind == "first attempt" and context.attemptNumber() == 0:
            raise RuntimeError("the first attempt fails after it has written")
        if self.kind == "partition 1" and context.partitionId() == 1:
            raise RuntimeError("one partition never succeeds")
        return message

    def commit(self, messages: list[Any]) -> None:
        super().commit(messages)
        if self.kind == "commit twice":
            super().commit(messages)
