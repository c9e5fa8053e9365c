"""What the live workers of a database report in their rows: open breakers, consumers, and types that they do not
handle.

The rows are read tolerantly: a worker of another version may report less, or in another form.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta

from django.db.models import Q

from ..models import NO_QUEUES, Now, Subscriber, UtcField
from ..models.subscribers import parse_json_list

#: A handler that runs for longer is named on the overview.
LONG_RUNNING = timedelta(minutes=1)


class Live:
    """The live workers of one queue, or the live dispatchers or maintenance processes of a database."""

    def __init__(self) -> None:
        self.count = 0
        #: The age of the last heartbeat of dead processes whose row is still there; only for ``NO_QUEUES``.
        self.last_heartbeat: timedelta | None = None
        #: The oldest heartbeat of the live ones.
        self.heartbeat: timedelta | None = None
        self.breakers: list[dict[str, str]] = []
        #: The handler that has run longest, beyond ``LONG_RUNNING``: its seconds, and where; None: there is none.
        self.longest: tuple[float, str] | None = None
        #: Messages in flight in these workers, as of their last heartbeats.
        self.in_flight = 0
        #: Names and message types of their consumers. None: a worker does not report them, so unroutable messages are
        #: unknown.
        self.recipients: set[str] | None = set()
        self.types: set[str] | None = set()
        self._unknown: set[str] = set()

    @property
    def unknown_types(self) -> set[str]:
        """Types that a worker met in the queue and no worker handles."""
        return set() if self.types is None else self._unknown - self.types

    def add(self, breakers: str, consumers: str, unknown_types: str) -> None:
        """Add the columns of one worker's row."""
        self.count += 1
        for breaker in breakers_of(breakers):
            if breaker not in self.breakers:
                self.breakers.append(breaker)
        reported = consumers_of(consumers)
        if not reported:
            self.recipients = self.types = None
        if self.recipients is not None and self.types is not None:
            self.recipients |= {name for name, _ in reported}
            self.types |= {kind for _, kind in reported}
        self._unknown |= {str(kind) for kind in parse_json_list(unknown_types)}

    def add_running(self, running: str, since: float, worker: str) -> None:
        """Add the running handlers of one worker's row; ``since``: the seconds since its heartbeat."""
        for seq, consumer, seconds in running_of(running)[:1]:
            elapsed = seconds + since
            if elapsed > LONG_RUNNING.total_seconds() and (self.longest is None or elapsed > self.longest[0]):
                self.longest = elapsed, f"message {seq} in {consumer} on {worker}"


def running_of(text: str) -> list[tuple[int, str, float]]:
    """The handlers of one worker that had run for more than a second at its last heartbeat, the longest first: the seq
    of the message, the consumer, and the seconds."""
    found = []
    for item in parse_json_list(text):
        with suppress(TypeError, ValueError):
            seq, consumer, seconds = item
            found.append((int(seq), str(consumer), float(seconds)))
    return found


def breakers_of(text: str) -> list[dict[str, str]]:
    """The circuit breakers of one worker that are not closed: breaker (its kind), name, state and error of each."""
    found = [item if isinstance(item, dict) else {"error": item} for item in parse_json_list(text)]
    found = found or ([{"error": text}] if text else [])
    shown = [{key: str(item.get(key, "")) for key in ("breaker", "name", "state", "error")} for item in found]
    return [item | {"breaker": item["breaker"] or item["name"]} for item in shown]


def consumers_of(text: str) -> list[tuple[str, str]]:
    """The consumers of one worker: name and message type of each."""
    return [(str(item[0]), str(item[1])) for item in parse_json_list(text) if isinstance(item, list) and len(item) > 1]


def live_on(alias: str, queues: Iterable[str] | None = None) -> defaultdict[str, Live]:
    """The live workers of a database by queue; the entry of a queue without workers is empty."""
    rows = Subscriber.objects.using(alias).filter(Q(alive_until__gt=Now()) | Q(queue__in=NO_QUEUES))
    rows = rows.annotate(now=Now(output_field=UtcField())).order_by("queue", "id")
    if queues is not None:
        rows = rows.filter(queue__in=list(queues))
    live: defaultdict[str, Live] = defaultdict(Live)
    for queue, now, beat, until, outstanding, running, host, process, *columns in rows.values_list(
        "queue", "now", "heartbeat_at", "alive_until", "outstanding", "running", "host", "process", "breakers",
        "consumers", "unknown_types",
    ):  # fmt: skip
        workers = live[queue]
        if until > now:
            workers.add(*columns)
            workers.in_flight += outstanding
            workers.add_running(running, (now - beat).total_seconds(), f"{host}:{process}")
            workers.heartbeat = max(workers.heartbeat or now - beat, now - beat)
        elif workers.last_heartbeat is None or now - beat < workers.last_heartbeat:
            workers.last_heartbeat = now - beat
    return live
