"""What groups and ordering keys cost beside the same work without them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from time import monotonic

from django.db import transaction

from queueapp import Group
from tests.benchmarks.figures import Figure, Ratio, Samples, Scale, measures
from tests.benchmarks.messages import Nop, make
from tests.benchmarks.models import Grouped, Leased, Ordered
from tests.benchmarks.rig import raw
from tests.benchmarks.rig.database import drain, fill
from tests.benchmarks.rig.workers import Workers

MEMBERS = 100_000


@measures(
    Figure("group-drain", ">= 0.7", "ratio", "drain of the 100,000 members of one group / of as many others (msg/s)"),
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
    Figure("ordered-drain", ">= 0.5", "ratio", "drain of 50,000 messages with 10,000 ordering keys / without (msg/s)"),
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


def _send(send: Callable[[], object]) -> float:
    """The seconds of a send without its commit, which wakes the workers."""
    with transaction.atomic():
        started = monotonic()
        send()
        return monotonic() - started
