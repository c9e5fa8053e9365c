"""The seeded schedule: which fault happens when, decided before the run begins, so that a seed reproduces it.

Victims are named by a fraction ("the worker at 0.73 of the list of living ones"), since ids are not known before.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass

#: Kind -> weight. Those in ``KILLS`` end processes, connections or the server; the others hurt the network, hold rows,
#: or are messages that do the killing.
FAULTS = {
    "child": 26,  # SIGKILL of a worker process
    "supervisor": 10,  # SIGKILL of a supervisor; its children find themselves orphaned
    "tree": 6,  # SIGKILL of a whole process tree at once
    "dispatcher": 9,  # SIGKILL of the process that dispatches delayed messages
    "celery": 14,  # SIGKILL of a child, the main process or the whole tree of Celery's worker
    "producer": 4,  # SIGKILL in the middle of a send
    "backend": 22,  # pg_terminate_backend
    "server": 4,  # stop -m immediate, start
    "deploy": 4,  # SIGTERM of a tree: an orderly restart
    "stall": 6,  # the proxy lets nothing pass for some seconds
    "cut": 7,  # the proxy resets its connections
    "poison_pill": 4,  # a message whose handler kills its process each time
    "savepoint": 8,  # another session holds rows of a queue in a savepoint for some seconds
}
KILLS = ("child", "supervisor", "tree", "dispatcher", "celery", "producer", "backend", "server")
SHORTEST_GAP, LONGEST_GAP = 1.5, 5.5


@dataclass(frozen=True)
class Fault:
    """One fault: seconds after the start, its kind, its victim (0 to 1), and two numbers it may use (0 to 1)."""

    at: float
    kind: str
    victim: float
    how: float
    long: float

    def pick(self, candidates: list) -> object:
        """The victim among ``candidates``, which must not be empty."""
        return candidates[int(self.victim * len(candidates))]


def schedule(seed: int, seconds: float, kinds: Collection[str] = FAULTS) -> list[Fault]:
    """All faults of a run that are of these kinds; one that is left out leaves a gap, and the others as they are."""
    chance = random.Random(seed)
    faults = []
    at = 3.0
    while at < seconds:
        kind = chance.choices(list(FAULTS), list(FAULTS.values()))[0]
        fault = Fault(at, kind, chance.random(), chance.random(), chance.random())
        if kind in kinds:
            faults.append(fault)
        at += chance.uniform(SHORTEST_GAP, LONGEST_GAP)
    return faults
