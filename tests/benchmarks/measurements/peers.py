"""The same drain against other queues on PostgreSQL, each in its own process and its fastest configuration."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from django.conf import settings

from tests.benchmarks.figures import Figure, Ratio, Samples, Scale, measures
from tests.benchmarks.measurements.drain import MESSAGES
from tests.benchmarks.messages import Nop
from tests.benchmarks.models import Leased
from tests.benchmarks.rig.database import connection_parameters, drain, fill
from tests.benchmarks.rig.workers import Workers


@measures(
    Figure("drain-vs-pgqueuer", ">= 3", "times", "AT_LEAST_ONCE, one worker process / pgqueuer, batch 500 (msg/s)"),
    Figure("drain-vs-procrastinate", ">= 100", "times", "AT_LEAST_ONCE, one worker process / procrastinate (msg/s)"),
)
def peers(scale: Scale) -> Samples:
    count = scale.count(MESSAGES)
    # Enough for the slower ones to run for seconds.
    counts = {"pgqueuer": scale.count(50_000), "procrastinate": scale.count(2_000)}
    for peer in counts:
        act(peer, "install")
    with Workers(Leased) as workers:
        workers.warm_up()
        for _ in range(scale.runs):
            sample: dict[str, Any] = {}
            for peer, theirs in counts.items():
                fill(Leased, Nop, count)
                ours = count / drain(Leased)
                sample[f"drain-vs-{peer}"] = Ratio(ours, theirs / act(peer, "drain", count=theirs))
            yield sample


def act(peer: str, name: str, **arguments: Any) -> float:
    """One act of a peer in its own process; returns the seconds it took."""
    order = {"peer": peer, "act": name, "parameters": connection_parameters(), **arguments}
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.peers.process", json.dumps(order)],
        cwd=settings.BASE_DIR,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    answer = done.stdout.split()[-1]
    return 0.0 if answer == "None" else float(answer)
