"""The cost of crash tracking, which a queue has for a while after a worker stopped without deregistering."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from time import monotonic, sleep
from typing import Any

from queueapp.models import Now, QueueControl, Subscriber
from tests.benchmarks.figures import Figure, Ratio, Samples, Scale, measures
from tests.benchmarks.messages import Count, Nap
from tests.benchmarks.models import Leased, Transactional
from tests.benchmarks.rig.database import drain, fill, flood, wait_until, wake
from tests.benchmarks.rig.tally import ENVIRONMENT, Tally
from tests.benchmarks.rig.workers import QUIET, Workers

#: Workers read once a second what is set for a queue.
HEARD = 3.0


@measures(
    Figure(
        "crash-tracking",
        ">= 0.25",
        "ratio",
        "TRANSACTIONAL drain, 1 ms a message, 4 receivers, with crash tracking / without (msg/s)",
    )
)
def crash_tracking(scale: Scale) -> Samples:
    # Enough of each for seconds.
    usual_count, tracked_count = scale.count(6_000), scale.count(1_500)
    with Workers(Transactional, environment=QUIET) as workers:
        workers.warm_up()
        for _ in range(scale.runs):
            fill(Transactional, Nap, usual_count)
            usual = drain(Transactional)
            fill(Transactional, Nap, tracked_count)
            with crashes_tracked(Transactional):
                slow = drain(Transactional)
            yield {"crash-tracking": Ratio(tracked_count / slow, usual_count / usual)}


@contextmanager
def crashes_tracked(queue: Any) -> Iterator[None]:
    """As after the death of a worker: the mark that maintenance sets, once the workers have read it, and have read its
    end."""
    QueueControl.objects.update_or_create(
        queue=queue._meta.label, defaults={"crash_tracking_until": Now() + timedelta(hours=1)}
    )
    sleep(HEARD)
    try:
        yield
    finally:
        QueueControl.objects.filter(queue=queue._meta.label).delete()
        sleep(HEARD)


# -- one tree of two is killed ------------------------------------------------------------------------------------

#: A death is noticed soon, and not so soon that a worker under load is taken for dead.
SOON = {"HEARTBEAT_INTERVAL": 0.5, "DEAD_AFTER": 2}


@measures(
    Figure(
        "killed-tree",
        ">= 0.5",
        "ratio",
        "AT_LEAST_ONCE under load, one of two worker trees SIGKILLed: 1 s after it was noticed / before (msg/s)",
    ),
    Figure("killed-tree-transactional", ">= 0.5", "ratio", "the same, TRANSACTIONAL"),
)
def killed_tree(scale: Scale) -> Samples:
    seconds = 1.0 if scale.quick else 3.0
    for _ in range(scale.runs):
        yield {
            "killed-tree": _killed(Leased, 3_000_000, seconds),
            "killed-tree-transactional": _killed(Transactional, 150_000, seconds),
        }


def _killed(queue: Any, backlog: int, seconds: float) -> Ratio:
    """Messages a second long after the death of one tree of two, and before."""
    QueueControl.objects.all().delete()
    fill(queue, Count, 0)
    tally = Tally.create(backlog)
    environment = QUIET | {ENVIRONMENT: str(tally.path)}
    try:
        # The one with the dispatcher buries the other.
        with (
            Workers(queue, dispatcher=True, environment=environment, **SOON),
            Workers(queue, beside=True, environment=environment, **SOON) as victim,
        ):
            flood(queue, Count, backlog)
            wake(queue)
            sleep(1.0)
            before = _rate(tally, seconds)
            rows = list(victim.subscribers.values_list("pk", flat=True))
            victim.kill()
            wait_until(lambda: not Subscriber.objects.filter(pk__in=rows).exists(), "the dead to be buried", 30.0)
            sleep(1.0)
            after = _rate(tally, seconds)
            if not queue.objects.filter(lease_token=None).exists():
                raise RuntimeError(f"{backlog} messages did not last")
        return Ratio(after, before)
    finally:
        QueueControl.objects.all().delete()
        fill(queue, Count, 0)  # the next worker of this queue has no tally to count them in
        tally.remove()


def _rate(tally: Tally, seconds: float) -> float:
    started, before = monotonic(), tally.handled()
    sleep(seconds)
    return (tally.handled() - before) / (monotonic() - started)
