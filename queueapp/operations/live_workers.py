"""What the live workers of a database say of themselves in their rows: trouble, their consumers, types that they do not know.

Their rows are read tolerantly: a worker of another version says less, or says it otherwise.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from datetime import timedelta

from django.db.models import Q

from ..models import NO_QUEUES, Now, Subscriber, UtcField
from ..models.subscribers import parse_json_list


class Live:
    """The live workers of one queue, or the live dispatchers or housekeepers of a database."""

    def __init__(self) -> None:
        self.count = 0
        #: The age of the last heartbeat of those that are dead and not forgotten yet; of ``NO_QUEUES`` only.
        self.last_pulse: timedelta | None = None
        #: The oldest heartbeat of those that live.
        self.heartbeat: timedelta | None = None
        self.breakers: list[dict[str, str]] = []
        #: Names and message types of their consumers. None: one of them did not say, so nobody knows what nobody takes.
        self.recipients: set[str] | None = set()
        self.types: set[str] | None = set()
        self._unknown: set[str] = set()

    @property
    def unknown_types(self) -> set[str]:
        """Types in the queue that one of them has met and none of them takes."""
        return set() if self.types is None else self._unknown - self.types

    def add(self, trouble: str, consumers: str, unknown_types: str) -> None:
        """One more row."""
        self.count += 1
        for told in trouble_of(trouble):
            if told not in self.breakers:
                self.breakers.append(told)
        said = consumers_of(consumers)
        if not said:
            self.recipients = self.types = None
        if self.recipients is not None and self.types is not None:
            self.recipients |= {name for name, _ in said}
            self.types |= {kind for _, kind in said}
        self._unknown |= {str(kind) for kind in parse_json_list(unknown_types)}


def trouble_of(text: str) -> list[dict[str, str]]:
    """What one worker tells of its circuit breakers: name, state and error of each that is not at rest."""
    told = [one if isinstance(one, dict) else {"error": one} for one in parse_json_list(text)]
    told = told or ([{"error": text}] if text else [])
    return [{name: str(one.get(name, "")) for name in ("name", "state", "error")} for one in told]


def consumers_of(text: str) -> list[tuple[str, str]]:
    """What one worker tells of its consumers: name and message type of each."""
    return [(str(one[0]), str(one[1])) for one in parse_json_list(text) if isinstance(one, list) and len(one) > 1]


def live_on(alias: str, queues: Iterable[str] | None = None) -> defaultdict[str, Live]:
    """The live workers of a database by queue; one who has none has an empty entry."""
    rows = Subscriber.objects.using(alias).filter(Q(alive_until__gt=Now()) | Q(queue__in=NO_QUEUES))
    rows = rows.annotate(now=Now(output_field=UtcField())).order_by("queue", "id")
    if queues is not None:
        rows = rows.filter(queue__in=list(queues))
    live: defaultdict[str, Live] = defaultdict(Live)
    for queue, now, beat, until, *told in rows.values_list(
        "queue", "now", "heartbeat_at", "alive_until", "breakers", "consumers", "unknown_types"
    ):
        one = live[queue]
        if until > now:
            one.add(*told)
            one.heartbeat = max(one.heartbeat or now - beat, now - beat)
        elif one.last_pulse is None or now - beat < one.last_pulse:
            one.last_pulse = now - beat
    return live
