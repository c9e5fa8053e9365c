"""The second phase of the demo: workers in processes of their own until everything is handled.

What was done is read from the database, never from the workers: a worker that is killed cannot answer, and one that is
alive may be wrong about what was committed. A supervisor that dies is started again; messages and figures do not care.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from django.conf import settings

from project.child_process import ChildProcess
from project.flights import figures
from project.flights.demo.progress import Progress
from queueapp.models import DelayedMessage
from queueapp.sql import nonblocking

#: On two cores: 1 x 4 threads made 377 messages/s where 2 x 2 made 412, 3 x 3 made 500 and 2 x 4 made 579. A handler
#: waits for its commit most of the time, and commits that wait together reach the disk together.
PROCESSES, CONCURRENCY = 2, 4
#: After so long without a change the demo fails. A killed leader's term and a dead worker's lease are shorter.
STALLED_SECONDS = 90.0
STOP_SECONDS = 30.0
_POLL_SECONDS = 0.25
_TRIES_WITHOUT_PROGRESS = 5


class HandlingStopped(RuntimeError):
    """The messages cannot be handled to the end. The text says what is known about the reason."""


@dataclass(frozen=True, slots=True)
class Handling:
    """How it went. ``seconds``: from the workers' start to the last flight; ``all_seconds``: to the last rebooking."""

    seconds: float
    all_seconds: float
    restarts: int


@dataclass(frozen=True, slots=True)
class State:
    """What the database says now."""

    handled: int
    poisoned: int
    delayed: int
    rebooked: int

    @classmethod
    def read(cls) -> State:
        return cls(
            figures.handled_flights(),
            figures.poison_messages().count(),
            nonblocking(DelayedMessage.objects.filter(destination__in=figures.LABELS)).count(),
            figures.rebooked_flights(),
        )

    @property
    def ended(self) -> int:
        """Flights whose message has come to its end, good or bad."""
        return self.handled + self.poisoned


def handle_until_empty(
    published: int, progress: Progress, log: Path, *, processes: int = PROCESSES, concurrency: int = CONCURRENCY
) -> Handling:
    """Run workers until their queues are empty; leaves none of them behind. Raises HandlingStopped."""
    # With DEBUG, Django keeps the text of each query, which is a sixth of a worker's time (1.29 against 1.52 ms).
    without_debug = {"DEBUG": "0", "SECRET_KEY": settings.SECRET_KEY, "ALLOWED_HOSTS": "localhost"}
    worker = ChildProcess(
        "runqueueworker", *figures.LABELS, "--until-empty",
        "--processes", str(processes), "--concurrency", str(concurrency), log=log, environment=without_debug,
    )  # fmt: skip
    began = monotonic()
    progress.begin("handling", published)
    worker.start()
    try:
        return _watch(worker, published, progress, began)
    finally:
        worker.stop(STOP_SECONDS)
        progress.end()


def _watch(worker: ChildProcess, published: int, progress: Progress, began: float) -> Handling:
    seconds = 0.0
    restarts = tries = 0
    last, changed_at = None, began
    while True:
        code = worker.exit_code(_POLL_SECONDS)
        state, now = State.read(), monotonic()
        if not seconds and state.ended >= published:
            seconds = now - began
        if state != last:
            last, changed_at, tries = state, now, 0
        progress.show(state.ended, _note(state, now - began))
        if code == 0:
            return Handling(seconds or now - began, now - began, restarts)
        if code is not None:
            restarts += 1
            tries += 1
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            if tries > _TRIES_WITHOUT_PROGRESS:
                raise HandlingStopped(f"The workers' supervisor {how} again and again: {worker.last_words()}")
            progress.say(f"The workers' supervisor {how}; starting it again.")
            worker.start()
        elif now - changed_at > STALLED_SECONDS:
            raise HandlingStopped(
                f"Nothing was handled for {STALLED_SECONDS:.0f} seconds (is a queue paused in the admin?): "
                f"{worker.last_words()}"
            )


def _note(state: State, seconds: float) -> str:
    if not state.ended:
        return "starting the workers"
    rate = f"{state.ended / max(seconds, 0.001):,.0f}/s"
    return f"{rate}  poison {state.poisoned:,}  delayed {state.delayed:,}  rebooked {state.rebooked:,}"
