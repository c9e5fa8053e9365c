"""What groups cost beside the same work without them."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from django.db import transaction

from queueapp import Group
from tests.benchmarks.figures import Figure, Ratio, Samples, Scale, measures
from tests.benchmarks.messages import Nop, make
from tests.benchmarks.models import Grouped, Leased
from tests.benchmarks.rig.database import drain
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


def _send(send: Callable[[], object]) -> float:
    """The seconds of a send without its commit, which wakes the workers."""
    with transaction.atomic():
        started = monotonic()
        send()
        return monotonic() - started
