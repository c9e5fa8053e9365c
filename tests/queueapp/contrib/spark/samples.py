"""Message classes and failing sinks, importable by Spark's Python workers."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from signal import SIGKILL
from typing import Any, Literal

import msgspec
from pyspark import TaskContext
from pyspark.sql.types import StructType

from queueapp.contrib.spark.client import SinkClient
from queueapp.contrib.spark.source import QueueDataSource
from queueapp.contrib.spark.targets import Snapshot
from queueapp.contrib.spark.writers import BatchWriter, Sink, StreamWriter


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


class Kinds(msgspec.Struct, omit_defaults=False):
    """A field for each kind of value."""

    nothing: str | None = None
    truth: bool = False
    whole: int = 0
    real: float = 0.5
    large: float = 0.5
    rounded: float = 0.5
    minus: float = 0.5
    number: Decimal = Decimal(0)
    nul: str = ""
    fffe: str = ""
    emoji: str = ""
    empty: str = "x"
    data: bytes = b""
    pieces: list[bytes | None] = []
    day: date = date(2026, 1, 1)
    aware: datetime = datetime(2026, 1, 1, tzinfo=UTC)
    first: datetime = datetime(2026, 1, 1, tzinfo=UTC)
    last: datetime = datetime(2026, 1, 1, tzinfo=UTC)
    naive: datetime = datetime(2026, 1, 1)
    duration: timedelta = timedelta(0)
    micro: timedelta = timedelta(0)
    identity: uuid.UUID = uuid.UUID(int=0)
    numbers: list[int | None] = []
    nested: list[list[int]] = []
    keys: dict[int, str] = {}
    reals: list[float] = []
    weights: dict[str, float] = {}
    moments: list[datetime] = []


class Plain(msgspec.Struct):
    """A field for each kind of value that Spark writes without Python."""

    nothing: str | None = None
    truth: bool = False
    whole: int = 0
    real: float = 0.5
    large: float = 0.5
    rounded: float = 0.5
    minus: float = 0.5
    number: Decimal = Decimal(0)
    nul: str = ""
    fffe: str = ""
    emoji: str = ""
    empty: str = "x"
    data: bytes = b""
    pieces: list[bytes | None] = []
    day: date | None = None
    aware: datetime | None = None
    first: datetime | None = None
    last: datetime | None = None
    naive: datetime | None = None
    identity: uuid.UUID | None = None
    numbers: list[int | None] = []
    nested: list[list[int]] = []
    reals: list[float] = []
    weights: dict[str, float] = {}
    moments: list[datetime] = []
    size: Literal["s", "m"] = "s"


#: What happens to tasks on a cluster.
FIRST_ATTEMPT, SPECULATED, EXECUTOR_KILLED = "first attempt", "speculated", "executor killed"
#: Moments of a commit at which a driver stands still until it is killed.
BEFORE, MIDDLE, AFTER = "hangs before the commit", "hangs in the middle", "hangs after the commit"


def failing_source(snapshot: Snapshot, kind: str, marks: Path) -> type[FailingSource]:
    """A data source, named after it, whose write misbehaves in the way of ``kind``; ``marks`` is an empty folder."""
    given = {"snapshot": snapshot, "kind": kind, "marks": str(marks), "__module__": __name__}
    return type("FailingSource", (FailingSource,), given)


class FailingSource(QueueDataSource):
    kind = ""
    marks = ""

    @classmethod
    def name(cls) -> str:
        return f"failing_{cls.kind.replace(' ', '_')}"

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
        writer = super().writer(schema, overwrite)
        return FailingWriter(writer, self.kind, self.marks)

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:
        writer = super().streamWriter(schema, overwrite)
        return HangingStreamWriter(writer.sink, self.kind, self.marks)


class FailingWriter(BatchWriter):
    def __init__(self, writer: BatchWriter, kind: str, marks: str) -> None:
        self.__dict__.update(writer.__dict__)
        self.kind = kind
        self.marks = marks

    def write(self, iterator: Iterator[Any]) -> Any:
        context = TaskContext.get()
        assert context is not None
        batches = list(iterator)
        if self.kind == "duplicate":
            # A speculative attempt that ends too, and is not the one whose message Spark keeps.
            super().write(iter(batches))
        message = super().write(iter(batches))
        if self.kind == SPECULATED and context.partitionId() == 0:
            # Both attempts stage their rows and end well.
            Path(self.marks, f"{SPECULATED} {context.attemptNumber()}").touch()
            self._wait_for(f"{SPECULATED} {1 - min(context.attemptNumber(), 1)}")
        if self.kind == EXECUTOR_KILLED and context.partitionId() == 1:
            killed = Path(self.marks, EXECUTOR_KILLED)
            if not killed.exists():
                killed.touch()
                # The parent of this process is the daemon that forked it, whose parent is the executor.
                os.kill(int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1]), SIGKILL)
        if self.kind == FIRST_ATTEMPT and context.attemptNumber() == 0:
            raise RuntimeError("the first attempt fails after it has written")
        Path(self.marks, str(context.partitionId())).touch()
        if self.kind == "partition 1" and context.partitionId() == 1:
            self._wait_for("0", "2")
            raise RuntimeError("one partition never succeeds")
        return message

    def _wait_for(self, *marks: str) -> None:
        """What is still under way when a job is aborted stages its rows all the same, and they are not dropped for a
        day."""
        deadline = time.monotonic() + 300
        while not all(Path(self.marks, mark).exists() for mark in marks):
            if time.monotonic() > deadline:
                raise TimeoutError(f"Waited 300 s in vain for {marks}.")
            time.sleep(0.05)

    def commit(self, messages: list[Any]) -> None:
        with hanging(self.kind, Path(self.marks, f"batch {self.kind}")):
            super().commit(messages)
        if self.kind == "commit twice":
            super().commit(messages)


class HangingStreamWriter(StreamWriter):
    def __init__(self, sink: Sink, kind: str, marks: str) -> None:
        super().__init__(sink)
        self.kind = kind
        self.marks = marks

    def commit(self, messages: list[Any], batchId: int) -> None:
        with hanging(self.kind, Path(self.marks, f"stream {self.kind}")):
            super().commit(messages, batchId)


@contextmanager
def hanging(kind: str, mark: Path) -> Iterator[None]:
    """Stand still at the moment of ``kind``, around a commit, until this process is killed; ``mark`` says so."""

    def hang() -> None:
        mark.touch()
        threading.Event().wait()

    if kind == BEFORE:
        hang()
    if kind == MIDDLE:
        move = SinkClient._move

        def moved(client: SinkClient, *given: Any) -> None:
            move(client, *given)
            hang()

        SinkClient._move = moved  # type: ignore[method-assign]
    yield
    if kind == AFTER:
        hang()
