"""The same drain against other queues on PostgreSQL, each in its own process and its fastest configuration."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

from django.conf import settings

from tests.benchmarks.figures import Absent, Figure, Ratio, Sample, Samples, Scale, measures
from tests.benchmarks.measurements.drain import MESSAGES
from tests.benchmarks.messages import Nop
from tests.benchmarks.models import Leased
from tests.benchmarks.peers.interpreter import NoInterpreter, interpreter_of
from tests.benchmarks.rig.database import connection_parameters, drain, fill
from tests.benchmarks.rig.workers import Workers

#: Messages of each: enough for the slower ones to run for seconds.
PEERS = {"pgqueuer": 50_000, "procrastinate": 2_000, "awa": 10_000, "dj_queue": 2_000}


@measures(
    Figure("drain-vs-pgqueuer", ">= 3", "times", "AT_LEAST_ONCE, one worker process / pgqueuer, batch 500 (msg/s)"),
    Figure("drain-vs-procrastinate", ">= 100", "times", "AT_LEAST_ONCE, one worker process / procrastinate (msg/s)"),
    Figure("drain-vs-awa", ">= 3", "times", "AT_LEAST_ONCE, one worker process / awa-pg, claims of 500 (msg/s)"),
    Figure("drain-vs-dj_queue", ">= 100", "times", "AT_LEAST_ONCE, one worker process / dj_queue, 16 threads (msg/s)"),
)
def peers(scale: Scale) -> Samples:
    count = scale.count(MESSAGES)
    pythons: dict[str, str] = {}
    absent: dict[str, Sample] = {}
    for peer in PEERS:
        try:
            pythons[peer] = interpreter_of(peer)
            act(peer, pythons[peer], "install")
        except NoInterpreter as error:
            absent[f"drain-vs-{peer}"] = Absent(str(error))
    with Workers(Leased) as workers:
        workers.warm_up()
        for _ in range(scale.runs):
            sample = dict(absent)
            for peer, python in pythons.items():
                second = scale.count(PEERS[peer])
                fill(Leased, Nop, count)
                product = count / drain(Leased)
                sample[f"drain-vs-{peer}"] = Ratio(product, second / act(peer, python, "drain", count=second))
            yield sample


def act(peer: str, python: str, name: str, **arguments: Any) -> float:
    """One act of a peer in its own process; returns the seconds it took."""
    order = {"peer": peer, "act": name, "parameters": connection_parameters(), **arguments}
    done = subprocess.run(
        [python, "-m", "tests.benchmarks.peers.process", json.dumps(order)],
        cwd=settings.BASE_DIR,
        env=os.environ | {"PYTHONPATH": str(settings.BASE_DIR)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    answer = done.stdout.split()[-1]
    return 0.0 if answer == "None" else float(answer)
