"""What many workers on one queue cost the database."""

from __future__ import annotations

from tests.benchmarks.figures import Figure, Ratio, Samples, Scale, measures
from tests.benchmarks.messages import Nap
from tests.benchmarks.models import Leased
from tests.benchmarks.rig.database import append, drain, fill
from tests.benchmarks.rig.workers import Workers, server_cpu_seconds

CROWD = 8
#: Messages per process that come before. Only work for all makes each of 32 tasks connect and prepare: with the 2,000
#: messages of nothing of ``Workers.warm_up`` half of the sessions met their first claim while they were measured, and
#: the reading and planning of a first claim costs the server as much as 30 messages.
WARM_UP = 1_000


@measures(
    Figure(
        "eight-workers",
        "<= 1.3",
        "ratio",
        "database CPU per message with 8 worker processes / with 1; 20,000 messages for each process, 1 ms each (µs)",
    ),
    Figure(
        "eight-workers-burst",
        "",
        "ratio",
        "the same with 20,000 messages for all 8 together (µs)",
    ),
)
def eight_workers(scale: Scale) -> Samples:
    count = scale.count(20_000)
    for _ in range(scale.runs):
        alone = _cpu_per_message(1, count)
        yield {
            # As much for each: what a process does once, or once a second, is to weigh the same on both sides.
            "eight-workers": Ratio(_cpu_per_message(CROWD, CROWD * count), alone),
            "eight-workers-burst": Ratio(_cpu_per_message(CROWD, count), alone),
        }


def _cpu_per_message(processes: int, count: int) -> float:
    """Microseconds that the server's processes for this database used per message."""
    with Workers(Leased, processes=processes):
        append(Leased, Nap, WARM_UP * processes)
        drain(Leased)
        fill(Leased, Nap, count)
        before = server_cpu_seconds()
        drain(Leased)
        # Connections that were opened meanwhile count from nothing; none ends so soon after its work.
        used = sum(seconds - before.get(process, 0.0) for process, seconds in server_cpu_seconds().items())
    return used / count * 1e6
