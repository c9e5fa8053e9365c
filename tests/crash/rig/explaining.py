"""What the faults of a run explain, and what they do not: by the record of each fault with its victim and time, and by
the file in which every start of a handler is written down.

duplicates      of an AT_LEAST_ONCE message: something must have happened to the worker that began first, between the
                start of
                its handler and its ack
poison          that a message has not earned: each failed attempt must be one that a strike can cause
rude ones       of an AT_MOST_ONCE queue that left an effect and are not poison: interrupted between the two
early ones      tasks of Celery that ack before they begin: run twice though their main process and its session came to
                no harm
restless ones   whose handlers were started so often that no worker can have counted them
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime, timedelta
from operator import itemgetter
from typing import Any

from ..workload.ledger import VICTIM, WORDS
from .fault_injection import ALL_TREES, HOLDER, Event
from .scene import Scene

#: More starts of one message's handler than any run of bad luck explains: three attempts, each interrupted repeatedly.
RESTLESS = 30
#: What a handler fails with that a strike has hit: its process, its session, and so all hand-outs that it had.
FAULT_ERRORS = ("ProcessDied", "Spent", "OperationalError", "InterfaceError", "WorkerLostError")
#: How a handler that had done its work fails when its session is interrupted: nothing of its own saw the error.
LOST_BESIDE_IT = "was lost while the handler ran"
#: What else says so of a session of SQL Server: not every driver has a class of its own for it.
LOST_ON_SQL_SERVER = ("Communication link failure", "is in the kill state", "Connection not open", "TCP Provider:")
#: What a handler raises on request.
ON_PURPOSE = ("Failed",)
#: The end of a process that no strike brings about: the engine's own service has ended.
OF_ITSELF = "one of its services ended"


#: Faults after which a worker stops: its supervisor is gone, or has been asked to end.
STOPPING = ("supervisor", "deploy")
#: What a handler of an AT_MOST_ONCE queue fails with that has not ended when the worker's grace has: no worker may
#: begin it again.
CUT_OFF = "WorkerStopped: crash.atmostonce"
#: The grace of ``chaos``, and as much again as a busy machine takes for the rest of the way.
GRACE = timedelta(seconds=15)

#: Faults that leave a main process of Celery's, and so its acks, as they are.
CHILDREN = ("child", "deploy")


class Explanations:
    """What happened in a run, asked for reasons."""

    def __init__(self, scene: Scene, events: Sequence[Event], lease: timedelta) -> None:
        self._scene = scene
        self._events = events
        self._lease = lease
        #: Which process started a message's handler, and when.
        self._starts = defaultdict[str, list[tuple[int, datetime]]](list)
        #: Ids of the processes that a handler killed: its own, or all of its tree.
        self._killed: set[int] = set()
        with contextlib.suppress(FileNotFoundError):
            for line in scene.starts_file.read_text().splitlines():
                key, _, _, process, at = line.rsplit(" ", 4)
                if key == VICTIM:
                    self._killed.add(int(process))
                    continue
                self._starts[key].append((int(process), datetime.fromtimestamp(float(at), UTC)))
                if key.startswith("pill-"):
                    self._killed.add(int(process))

    def unexplained_duplicates(self, keys: Sequence[str]) -> list[str]:
        """The keys of AT_LEAST_ONCE messages of which a worker came to no harm between the start of its handler and the
        effect of the one that began next. (Of one that is stalled the effect may be the last to arrive.)

        An event counts from when it began until one lease period after its end: what a interrupted worker held comes
        back, and what was stalled arrives, within that time. A handler that takes longer than a lease leaves its effect
        after that.
        """

        def began(key: str, process: int, at: datetime) -> datetime:
            return max((item for by, item in self._starts[key] if by == process and item <= at), default=at)

        return self._unexplained(keys, began)

    def unexplained_late_duplicates(self, keys: Sequence[str]) -> list[str]:
        """The same of tasks that ack when they have ended. A task that is retried is a new message each time, so that
        two effects may come of one that was started twice, long before either: from its first start on."""
        return self._unexplained(keys, self._first_start)

    def unexplained_early_duplicates(self, keys: Sequence[str]) -> list[str]:
        """The keys of tasks that ack before they begin and were run twice, though what wrote their acks came to no
        harm: only the main process and its session do, so a killed child explains none."""
        return self._unexplained(keys, self._first_start, but=CHILDREN)

    def unexplained_kept_twice(self, keys: Sequence[str], tree: str) -> list[str]:
        """The keys of tasks that failed in two hand-outs, of a tree that came to no harm between the first and the
        last."""
        remaining = []
        for key in keys:
            starts = [at for _, at in self._starts[key]]
            if not (starts and self._harmed(tree, 0, min(starts), max(starts))):
                remaining.append(key)
        return remaining

    def unexplained_losses(self, keys: Sequence[str]) -> list[str]:
        """The keys of tasks that ack before they begin and are gone, where nothing at all was interrupted."""
        return [] if any(event.victim != HOLDER for event in self._events) else list(keys)

    def unexplained_ends(self, keys: Sequence[str]) -> list[str]:
        """The keys of rude AT_MOST_ONCE messages whose worker came to no harm between their effect and its
        recording."""
        moment = timedelta(seconds=2)
        return [key for key in keys if not any(self._harmed(w, p, at, at + moment) for w, p, at in self.effects(key))]

    def unexplained_poison(self, keys: Sequence[str]) -> list[str]:
        """The keys of poison with an attempt that failed otherwise than by a strike, or before the first one; with what
        it failed of."""
        first = min((event.began for event in self._events if event.victim != HOLDER), default=None)
        remaining = []
        for key in keys:
            for failed in self._history(key):
                kind = failed["exception"].split(":", 1)[0]
                by_fault = kind in FAULT_ERRORS or (kind == "LeakedState" and LOST_BESIDE_IT in failed["exception"])
                by_fault = by_fault or any(text in failed["exception"] for text in LOST_ON_SQL_SERVER)
                by_fault = by_fault and OF_ITSELF not in failed["exception"] and first is not None
                at = datetime.fromisoformat(failed["at"])
                cut_off = failed["exception"].startswith(CUT_OFF) and self._stopping(at)
                if kind not in ON_PURPOSE and not cut_off and not (by_fault and at >= first):
                    remaining.append(f"{key} ({failed['exception'][:100]})")
                    break
        return remaining

    def restless(self) -> list[str]:
        """The keys of messages that were started too often for a worker to have counted."""
        return [f"{key} ({len(starts)} starts)" for key, starts in self._starts.items() if len(starts) > RESTLESS]

    def effects(self, key: str) -> list[tuple[Any, ...]]:
        """(Tree, process, when) of each effect of a message, in their order."""
        sql = 'SELECT worker, process, "at" FROM crash_effect WHERE "key" = %s ORDER BY number'
        clock = self._scene.server.on_this_clock
        return [(worker, process, clock(at)) for worker, process, at in self._scene.execute(sql, key)]

    # -- inside ---------------------------------------------------------------------------------------------------

    def _unexplained(
        self, keys: Sequence[str], began: Callable[[str, int, datetime], datetime], but: Collection[str] = ()
    ) -> list[str]:
        remaining = []
        for key in keys:
            effects = [(began(key, process, at), worker, process, at) for worker, process, at in self.effects(key)]
            effects.sort(key=itemgetter(0))
            for (since, worker, process, _), (*_, until) in itertools.pairwise(effects):
                # Where a child explains nothing, one that was killed by its own task does not either.
                if not self._harmed(worker, 0 if but else process, since, until, but):
                    remaining.append(key)
                    break
        return remaining

    def _stopping(self, at: datetime) -> bool:
        """Whether a worker may have been in its grace then."""
        return any(event.kind in STOPPING and event.began <= at <= event.ended + GRACE for event in self._events)

    def _first_start(self, key: str, process: int, at: datetime) -> datetime:
        return min((item for _, item in self._starts[key]), default=at)

    def _harmed(self, worker: str, process: int, since: datetime, until: datetime, but: Collection[str] = ()) -> bool:
        return process in self._killed or any(
            event.victim in (worker, ALL_TREES)
            and event.kind not in but
            and event.began <= until
            and event.ended + self._lease >= since
            for event in self._events
        )

    def _history(self, key: str) -> list[dict[str, Any]]:
        rows = self._scene.execute(
            "SELECT failures, exception_type, exception_message, failed_at FROM queueapp_poisonmessage "
            f"WHERE {WORDS[self._scene.server.vendor].key} = %s",
            key,
        )
        clock = self._scene.server.on_this_clock
        found: list[dict[str, Any]] = []
        for failures, kind, text, at in rows:
            last = {"exception": f"{kind.rsplit('.', 1)[-1]}: {text}", "at": clock(at).isoformat()}
            found += json.loads(failures or "[]") or [last]
        return found
