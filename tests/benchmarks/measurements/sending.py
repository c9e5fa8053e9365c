"""What a send costs: one by one, in bulk, and with wake-ups."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

from django.conf import settings
from django.db import connection, transaction

from queueapp.notifier import CHANNEL
from tests.benchmarks.figures import Figure, Ratio, Sample, Samples, Scale, measures
from tests.benchmarks.messages import Nop, make
from tests.benchmarks.models import Copied, Leased
from tests.benchmarks.rig import sender
from tests.benchmarks.rig.database import outgoing, raw_connection
from tests.benchmarks.rig.raw import copy

_TABLE = Leased._meta.db_table
_INSERT = f"INSERT INTO {_TABLE} (id, headers, body) VALUES (%s, %s, %s)"
_BLOCK = 250


@measures(
    Figure(
        "send", ">= 1.0", "ratio", "send() on its own / bare INSERT through the same Django connection's cursor (msg/s)"
    ),
    Figure("send-in-transaction", ">= 0.95", "ratio", "the same inside the caller's transaction (msg/s)"),
)
def send(scale: Scale) -> Samples:
    bodies = [make(Nop, number) for number in range(_BLOCK)]
    rows = [row[:3] for row in outgoing(Nop, _BLOCK)]

    def by_send() -> None:
        for body in bodies:
            Leased.send(body)

    def by_insert() -> None:
        with connection.cursor() as cursor:
            for row in rows:
                cursor.execute(_INSERT, row)

    by_send()
    by_insert()
    for _ in range(scale.runs):
        _truncate()
        alone = _alternate(by_send, by_insert, scale.count(20))
        within = _alternate(by_send, by_insert, scale.count(20), in_transaction=True)
        yield {"send": alone, "send-in-transaction": within}


@measures(
    Figure(
        "send-copies",
        ">= 1.5",
        "ratio",
        "a send to three consumers, a copy for each / three sends (messages sent per second)",
    )
)
def send_copies(scale: Scale) -> Samples:
    bodies = [make(Nop, number) for number in range(_BLOCK)]

    def by_copies() -> None:
        for body in bodies:
            Copied.send(body)

    def by_three() -> None:
        for body in bodies:
            for _ in range(3):
                Leased.send(body)

    by_copies()
    assert Copied.objects.count() == 3 * _BLOCK
    by_three()
    for _ in range(scale.runs):
        _truncate()
        Copied.objects.all()._raw_delete(using="default")
        yield {"send-copies": _alternate(by_copies, by_three, scale.count(20))}


def _alternate(
    product: Callable[[], None], base: Callable[[], None], blocks: int, in_transaction: bool = False
) -> Ratio:
    """A block of ours, a block of the other, and so on: two numbers of messages a second."""
    seconds = [0.0, 0.0]
    for _ in range(max(2, blocks)):
        for index, body in enumerate((product, base)):
            if in_transaction:
                with transaction.atomic():
                    seconds[index] += _timed(body)
            else:
                seconds[index] += _timed(body)
    count = max(2, blocks) * _BLOCK
    return Ratio(count / seconds[0], count / seconds[1])


def _timed(body: Callable[[], None]) -> float:
    started = monotonic()
    body()
    return monotonic() - started


def _truncate() -> None:
    with connection.cursor() as cursor:
        cursor.execute(f"TRUNCATE {_TABLE}")
        cursor.execute("CHECKPOINT")


@measures(Figure("send-many", ">= 0.75", "ratio", "send_many(100,000) / raw binary COPY of the same rows (msg/s)"))
def send_many(scale: Scale) -> Samples:
    count = scale.count(100_000)
    bodies = [make(Nop, number) for number in range(count)]
    rows = [row[:3] for row in outgoing(Nop, count)]
    Leased.send_many(bodies[:1000])
    with raw_connection() as raw:
        for _ in range(scale.runs):
            _truncate()
            timed = _timed(lambda: Leased.send_many(bodies))
            _truncate()
            base = _timed(lambda: copy(raw, _TABLE, rows))
            yield {"send-many": Ratio(count / timed, count / base)}


# -- wake-ups -----------------------------------------------------------------------------------------------------


@measures(
    Figure("wake-ups-1-sender", ">= 0.93", "ratio", "sends of one process with wake-ups / without (msg/s)"),
    Figure("wake-ups-4-senders", ">= 0.85", "ratio", "sends of four processes with wake-ups / without (msg/s)"),
)
def wake_ups(scale: Scale) -> Samples:
    count = scale.count(6000)
    with senders(4, wake_ups=True) as woken, senders(4, wake_ups=False) as silent, listener():
        for _ in range(scale.runs):
            sample: dict[str, Sample] = {}
            for number, name in ((1, "wake-ups-1-sender"), (4, "wake-ups-4-senders")):
                rates = []
                for part in (woken[:number], silent[:number]):
                    _truncate()
                    rates.append(count / _all_send(part, count // number))
                sample[name] = Ratio(*rates)
            yield sample


@contextmanager
def senders(number: int, *, wake_ups: bool) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that send on request."""
    command = [sys.executable, "-m", "tests.benchmarks.rig.sender", "" if wake_ups else sender.SILENT]
    processes = [
        subprocess.Popen(
            command,
            cwd=settings.BASE_DIR,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            process_group=0,
        )
        for _ in range(number)
    ]
    try:
        _all_send(processes, 10)
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def _all_send(processes: list[subprocess.Popen[str]], count: int) -> float:
    """Let each process send so many; returns the seconds until the last one is done."""
    started = monotonic()
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(f"{count}\n")
    for process in processes:
        assert process.stdout is not None
        if process.stdout.readline().strip() != sender.DONE:
            raise RuntimeError("a sender died")
    return monotonic() - started


@contextmanager
def listener() -> Iterator[None]:
    """A connection that listens to wake-ups, as a worker's does."""
    ended = threading.Event()

    def listen() -> None:
        with raw_connection() as raw:
            raw.execute(f"LISTEN {CHANNEL}")
            while not ended.is_set():
                for _ in raw.notifies(timeout=0.2):
                    pass

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
