"""What groups, ordering keys, fair share and a ledger cost beside the same work without them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

from django.db import transaction

from queueapp import Group
from queueapp.operations import control
from tests.benchmarks.figures import Figure, Ratio, Samples, Scale, measures
from tests.benchmarks.messages import Nop, make
from tests.benchmarks.models import (
    Grouped,
    Leased,
    Ledgered,
    LedgeredTransactional,
    LimitedPerKey,
    Ordered,
    RatedPerKey,
    Shared,
    Transactional,
)
from tests.benchmarks.rig import raw
from tests.benchmarks.rig.database import drain, fill
from tests.benchmarks.rig.workers import Workers

MEMBERS = 100_000


@measures(
    Figure("group-drain", ">= 0.35", "ratio", "drain of the 100,000 members of one group / of as many others (msg/s)"),
    Figure("group-send-many", "", "ratio", "send_many(100,000) of a group / of a queue (msg/s)"),
)
def groups(scale: Scale) -> Samples:
    count = scale.count(MEMBERS)
    bodies = [make(Nop, number) for number in range(count)]
    with Workers(Grouped, Leased) as workers:
        workers.warm_up()
        for _ in range(scale.runs):
            with Group() as group:
                sent = _send(lambda group=group: group.send_many(Grouped, bodies))
                product = drain(Grouped)
            assert group.is_complete
            assert group.counts().done == count
            plain = _send(lambda: Leased.send_many(bodies))
            base = drain(Leased)
            yield {
                "group-drain": Ratio(count / product, count / base),
                "group-send-many": Ratio(count / sent, count / plain),
            }


@measures(
    Figure("ordered-drain", ">= 0.2", "ratio", "drain of 50,000 messages with 10,000 ordering keys / without (msg/s)"),
    Figure("ordered-hot-key", ">= 0.8", "ratio", "drain of one ordering key / raw lease of 1 and ack of 1 (msg/s)"),
)
def ordering(scale: Scale) -> Samples:
    count, hot = scale.count(50_000), scale.count(10_000)
    keys = max(1, count // 5)
    bodies = [make(Nop, number) for number in range(count)]
    with Workers(Ordered, Leased) as workers:
        workers.warm_up()
        for _ in range(scale.runs):
            numbers = itertools.count()
            _send(lambda numbers=numbers: Ordered.send_many(bodies, ordering_key=lambda _: f"k{next(numbers) % keys}"))
            product = drain(Ordered)
            _send(lambda: Leased.send_many(bodies))
            base = drain(Leased)
            _send(lambda: Ordered.send_many(bodies[:hot], ordering_key="hot"))
            in_order = drain(Ordered)
            fill(Leased, Nop, hot)
            loop = raw.lease_and_ack(Leased._meta.db_table, 1)
            yield {
                "ordered-drain": Ratio(count / product, count / base),
                "ordered-hot-key": Ratio(hot / in_order, hot / loop),
            }


@measures(
    Figure("fair-share", ">= 0.25", "ratio", "drain of 50,000 messages, 100 tenants take turns / without (msg/s)"),
    Figure("limit-per-key", "", "ratio", "the same with a limit per tenant that is not reached / without (msg/s)"),
    Figure("rate-per-key", "", "ratio", "the same with a rate per tenant that is not reached / without (msg/s)"),
)
def fair_share(scale: Scale) -> Samples:
    count = scale.count(50_000)
    bodies = [make(Nop, number) for number in range(count)]
    with Workers(Shared, LimitedPerKey, RatedPerKey, Leased) as workers:
        workers.warm_up()
        for _ in range(scale.runs):
            seconds = []
            for queue in (Shared, LimitedPerKey, RatedPerKey):
                _send(lambda queue=queue: _send_of_tenants(queue, bodies))
                seconds.append(drain(queue))
            _send(lambda: Leased.send_many(bodies))
            base = drain(Leased)
            yield {
                "fair-share": Ratio(count / seconds[0], count / base),
                "limit-per-key": Ratio(count / seconds[1], count / base),
                "rate-per-key": Ratio(count / seconds[2], count / base),
            }


@measures(
    Figure("ledger-drain", "", "ratio", "drain of 100,000 messages of a queue with a ledger / without (msg/s)"),
    Figure("ledger-transactional", "", "ratio", "the same of 10,000, TRANSACTIONAL, empty handlers, 4 threads (msg/s)"),
)
def ledger(scale: Scale) -> Samples:
    count, single = scale.count(MEMBERS), scale.count(10_000)
    bodies = [make(Nop, number) for number in range(count)]
    with Workers(Ledgered, Leased, LedgeredTransactional, Transactional) as workers:
        workers.warm_up()
        for _ in range(scale.runs):
            seconds = {}
            for queue in (Ledgered, Leased, LedgeredTransactional, Transactional):
                given = bodies if queue in (Ledgered, Leased) else bodies[:single]
                _send(lambda queue=queue, given=given: queue.send_many(given))
                seconds[queue] = drain(queue)
            yield {
                "ledger-drain": Ratio(count / seconds[Ledgered], count / seconds[Leased]),
                "ledger-transactional": Ratio(single / seconds[LedgeredTransactional], single / seconds[Transactional]),
            }


@measures(Figure("ledger-send", "", "ratio", "send() on its own to a queue with a ledger / without (msg/s)"))
def ledger_send(scale: Scale) -> Samples:
    bodies = [make(Nop, number) for number in range(250)]
    for _ in range(scale.runs):
        seconds = {Ledgered: 0.0, Leased: 0.0}
        for _ in range(max(2, scale.count(20))):
            for queue in seconds:
                started = monotonic()
                for body in bodies:
                    queue.send(body)
                seconds[queue] += monotonic() - started
        for queue in seconds:
            control.purge(queue)
        yield {"ledger-send": Ratio(1 / seconds[Ledgered], 1 / seconds[Leased])}


def _send_of_tenants(queue: Any, bodies: Sequence[Nop]) -> None:
    for tenant in range(100):
        queue.send_many(bodies[tenant::100], headers={"tenant": f"tenant {tenant}"})


def _send(send: Callable[[], object]) -> float:
    """The seconds of a send without its commit, which wakes the workers."""
    with transaction.atomic():
        started = monotonic()
        send()
        return monotonic() - started
