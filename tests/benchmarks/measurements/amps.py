"""What the options of AMPS cost beside a queue without them: as a ratio, in statements, and in bytes of WAL per
message.

The ratios are timed; what a message's life comes to in statements and WAL is counted afterwards, in a run of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from time import monotonic, sleep
from typing import Any

from django.db import connection, transaction
from django.test.utils import override_settings

from queueapp import publish
from tests.autovacuum import without_autovacuum
from tests.benchmarks.figures import Absent, Beside, Figure, Ratio, Sample, Samples, Scale, measures
from tests.benchmarks.messages import Doze, Nop, make
from tests.benchmarks.models import (
    KEPT_TOPIC,
    LEVELS,
    SHARED_TOPIC,
    Capped,
    Defaults,
    Fair,
    Fenced,
    First,
    Kept,
    Leased,
    Levelled,
    Loose,
    Ranked,
    Second,
    Third,
    Tight,
    Unkept,
)
from tests.benchmarks.rig import raw
from tests.benchmarks.rig.asked import Asked, asked, logged, server_log
from tests.benchmarks.rig.database import REST, drain, fill
from tests.benchmarks.rig.workers import QUIET, Workers

MESSAGES = 50_000
WARM_UP = 2_000
#: Sends that are timed at a time.
BLOCK = 250
#: Of the processes that send here: no worker is woken by a message before the clock runs.
SILENT = {"NOTIFY": False}

Fill = Callable[[Any, int], object]


def _figures(name: str, bar: str, meaning: str) -> tuple[Figure, ...]:
    return (
        Figure(name, bar, "ratio", f"{meaning} (msg/s)"),
        Figure(f"{name}-statements", "", "", "statements per message of the same, from its send on"),
        Figure(f"{name}-wal", "", "B", "WAL per message of the same"),
    )


# -- received ------------------------------------------------------------------------------------------------------


@measures(*_figures("max-backlog", ">= 0.66", "AT_LEAST_ONCE with max_backlog, two worker processes / without"))
def max_backlog(scale: Scale) -> Samples:
    return _drains("max-backlog", Capped, Leased, scale, processes=2)


@measures(*_figures("fairness", "", "AT_LEAST_ONCE, messages distributed in proportion, two worker processes / FAST"))
def fairness(scale: Scale) -> Samples:
    return _drains("fairness", Fair, Leased, scale, processes=2)


@measures(
    Figure("amps-defaults", "", "ratio", "AMPS' defaults (in proportion, one message in flight), one worker process / "
           "raw lease of 1 under the queue's lock and ack of 1 (msg/s)"),
    Figure("amps-defaults-workers", "", "ratio", "the same, four worker processes / one (msg/s)"),
)  # fmt: skip
def defaults(scale: Scale) -> Samples:
    count = scale.count(2_000)
    for _ in range(scale.runs):
        seconds = []
        for processes in (1, 4):
            with Workers(Defaults, processes=processes, environment=QUIET) as workers:
                workers.warm_up(200)
                fill(Defaults, Nop, count)
                seconds.append(drain(Defaults))
        fill(Defaults, Nop, count)
        base = raw.lease_and_ack_under_lock(Defaults._meta.db_table)
        yield {
            "amps-defaults": Ratio(count / seconds[0], count / base),
            "amps-defaults-workers": Ratio(count / seconds[1], count / seconds[0]),
        }


@measures(Figure("tight-backlog", "", "ratio", "handlers of 20 ms, 8 receivers, max_backlog 7 / without (msg/s)"))
def tight_backlog(scale: Scale) -> Samples:
    count = scale.count(1_600)
    for _ in range(scale.runs):
        seconds = []
        for queue in (Tight, Loose):
            with Workers(queue, environment=QUIET):
                fill(queue, Doze, count)
                seconds.append(drain(queue))
        yield {"tight-backlog": Ratio(count / seconds[0], count / seconds[1])}


@measures(*_figures("priority-64", "", f"AT_LEAST_ONCE, each message of a priority of its own / {LEVELS} levels"))
def priority(scale: Scale) -> Samples:
    return _drains("priority-64", Ranked, Levelled, scale, fill_base=_on_levels)


@measures(*_figures("barriers", "", "AT_LEAST_ONCE with a barrier_expression that no message matches / without"))
def barriers(scale: Scale) -> Samples:
    return _drains("barriers", Fenced, Leased, scale)


def _sent(queue: Any, count: int) -> None:
    queue.send_many(_bodies(count))


def _on_levels(queue: Any, count: int) -> None:
    """The same messages, as many on each level."""
    with transaction.atomic():
        for level in range(LEVELS):
            queue.send_many((make(Nop, number) for number in range(level, count, LEVELS)), priority=level)


def _drains(name: str, queue: Any, base: Any, scale: Scale, *, processes: int = 1, fill_base: Fill = _sent) -> Samples:
    count = scale.count(MESSAGES)
    fills: dict[Any, Fill] = {queue: _sent, base: fill_base}
    with ExitStack() as stack:
        stack.enter_context(override_settings(QUEUEAPP=SILENT))
        for item in fills:
            stack.enter_context(without_autovacuum(item))
        # One tree for each, so that neither has the other's tasks to look after.
        with ExitStack() as trees:
            for item, fill in fills.items():
                trees.enter_context(Workers(item, processes=processes, beside=True, environment=QUIET))
                _filled(item, fill, WARM_UP)
                drain(item)
            rates = []
            for _ in range(scale.runs):
                seconds = []
                for item, fill in fills.items():
                    _filled(item, fill, count)
                    seconds.append(drain(item))
                rates.append(Ratio(count / seconds[0], count / seconds[1]))
        yield from _with_cost(
            name, rates, lambda: [_life(candidate, fill, count, processes) for candidate, fill in fills.items()]
        )


def _filled(queue: Any, fill: Fill, count: int) -> None:
    """Exactly so many messages, in a table as a vacuum leaves it."""
    sleep(REST)
    _empty(queue)
    fill(queue, count)
    with connection.cursor() as cursor:
        cursor.execute(f"VACUUM (ANALYZE) {_table(queue)}")


def _life(queue: Any, fill: Fill, count: int, processes: int) -> tuple[float, float]:
    """(statements, bytes) per message, from its send to its ack."""
    with Workers(queue, processes=processes, environment=QUIET):
        _filled(queue, fill, WARM_UP)
        drain(queue)
        sleep(REST)
        _empty(queue)

        def live() -> None:
            fill(queue, count)
            drain(queue)

        return asked(count, live)


# -- sent ----------------------------------------------------------------------------------------------------------


@measures(*_figures("publish", "", "publish to three queues / three sends, in the caller's transaction"))
def publishing(scale: Scale) -> Samples:
    def three_sends(body: Nop) -> None:
        for queue in (First, Second, Third):
            queue.send(body)

    return _sends("publish", lambda body: publish(SHARED_TOPIC, body), three_sends, (First, Second, Third), scale)


@measures(*_figures("journal", "", "publish to one queue over a journaled topic / over one that is not journaled"))
def journal(scale: Scale) -> Samples:
    return _sends(
        "journal",
        lambda body: publish(KEPT_TOPIC, body),
        lambda body: publish("unkept", body),
        (Kept, Unkept),
        scale,
        JOURNAL={KEPT_TOPIC: None},
    )


def _sends(
    name: str,
    product: Callable[[Nop], object],
    base: Callable[[Nop], object],
    queues: Iterable[Any],
    scale: Scale,
    **queueapp: Any,
) -> Samples:
    blocks = max(2, scale.count(20))
    bodies = list(_bodies(BLOCK))

    def send(way: Callable[[Nop], object]) -> None:
        with transaction.atomic():
            for body in bodies:
                way(body)

    with override_settings(QUEUEAPP=SILENT | queueapp):
        send(product), send(base)
        rates = []
        for _ in range(scale.runs):
            for queue in queues:
                _empty(queue)
            seconds = [0.0, 0.0]
            for _ in range(blocks):
                for index, way in enumerate((product, base)):
                    started = monotonic()
                    send(way)
                    seconds[index] += monotonic() - started
            rates.append(Ratio(blocks * BLOCK / seconds[0], blocks * BLOCK / seconds[1]))

        def cost_of(way: Callable[[Nop], object]) -> Asked:
            for queue in queues:
                _empty(queue)
            return asked(blocks * BLOCK, lambda: _repeat(blocks, lambda: send(way)))

        def cost() -> list[tuple[float, float]]:
            found: list[tuple[float, float]] = []
            for way in (product, base):
                send(way)  # what is prepared once is no part of a message
                # The lesser of two: the WAL is the whole server's, and a vacuum somewhere came to half a message more
                # (seen).
                found.append(min((cost_of(way) for _ in range(2)), key=lambda item: item.bytes))
            return found

        yield from _with_cost(name, rates, cost)


# -- both ----------------------------------------------------------------------------------------------------------


def _with_cost(name: str, rates: list[Ratio], cost: Callable[[], list[tuple[float, float]]]) -> Samples:
    """The ratios, the first one with what it costs."""
    sample: dict[str, Sample] = {name: rates[0]}
    if server_log() is None:
        absent = Absent("statements are counted in the log of the embedded server")
        sample |= {f"{name}-statements": absent, f"{name}-wal": absent}
    else:
        with logged():
            (statements, written), (base_statements, base_written) = cost()
        sample[f"{name}-statements"] = Beside(statements, base_statements)
        sample[f"{name}-wal"] = Beside(written, base_written)
    yield sample
    for rate in rates[1:]:
        yield {name: rate}


def _repeat(times: int, action: Callable[[], object]) -> None:
    for _ in range(times):
        action()


def _bodies(count: int) -> Iterable[Nop]:
    return (make(Nop, number) for number in range(count))


def _empty(queue: Any) -> None:
    with connection.cursor() as cursor:
        cursor.execute(f"TRUNCATE {_table(queue)}")
        # From here on every page of the table is made anew, and a new page has no full-page image.
        cursor.execute("CHECKPOINT")


def _table(queue: Any) -> str:
    return connection.ops.quote_name(queue._meta.db_table)  # type: ignore[no-any-return]
