"""What is the matter, now: poison groups, queues behind their bounds, workers that have died. Figures that are not known raise
nothing and resolve nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from ..conf import settings
from ..models import Now, PoisonMessage, Subscriber, distinct_values
from ..operations import statistics
from ..sql import nonblocking
from .options import bound_of

POISON, DEAD_WORKER, AGE, DEPTH = "poison", "dead_worker", "age", "depth"
#: Poison groups that are told apart.
MOST_GROUPS = 200
#: Characters of a text and of a name.
TEXT, NAME = 500, 255


@dataclass(frozen=True)
class Condition:
    """Something that is the matter. ``text``: for people, in one line, without a word of any message."""

    kind: str
    queue: str
    name: str
    text: str

    @property
    def key(self) -> str:
        """One alert for each. A group of poison is one, whichever queues it is in."""
        queue = "" if self.kind == POISON else self.queue
        return hashlib.sha256(f"{self.kind}\0{queue}\0{self.name}".encode()).hexdigest()


@dataclass
class Seen:
    """What a look has found. ``known``: (kind, queue) of which it can be said that what is not found is over."""

    conditions: list[Condition] = field(default_factory=list)
    known: set[tuple[str, str]] = field(default_factory=set)


def look(alias: str, queues: Iterable[Any]) -> Seen:
    """Everything but deaths, which are told when they happen."""
    seen = Seen()
    mine = {queue._meta.label: queue for queue in queues}
    if settings.ALERTS.get("poison", True):
        _poison(alias, set(mine), seen)
    bounded = [
        queue
        for label, queue in mine.items()
        if bound_of("max_age", label) or bound_of("max_waiting", label) is not None
    ]
    for one in statistics.queue_stats(bounded) if bounded else ():
        if one.waiting is None:
            continue
        age: timedelta | None = bound_of("max_age", one.queue)
        depth: int | None = bound_of("max_waiting", one.queue)
        if age is not None:
            seen.known.add((AGE, one.queue))
            if one.oldest_seconds is not None and one.oldest_seconds > age.total_seconds():
                waits, most = statistics.span(one.oldest_seconds), statistics.span(age.total_seconds())
                text = f"{one.queue}: the oldest message waits for {waits}, more than {most}"
                seen.conditions.append(Condition(AGE, one.queue, "", text))
        if depth is not None:
            seen.known.add((DEPTH, one.queue))
            if one.waiting > depth:
                many = f"{'' if one.exact else 'about '}{one.waiting}"
                text = f"{one.queue}: {many} messages wait, more than {depth}"
                seen.conditions.append(Condition(DEPTH, one.queue, "", text))
    return seen


def _poison(alias: str, mine: set[str], seen: Seen) -> None:
    unresolved = nonblocking(PoisonMessage.objects.using(alias)).filter(status=PoisonMessage.Status.UNRESOLVED)
    groups = distinct_values(unresolved, "group_key")
    for number, group in enumerate(groups, 1):
        if number > MOST_GROUPS:
            return  # what lies behind is not known to be over
        row = (
            unresolved.filter(group_key=group, queue__in=mine).order_by("-number")
            .values_list("queue", "consumer", "exception_type").first()
        )  # fmt: skip
        if row is not None:
            queue, consumer, exception = row
            what = exception or "messages that no handler could read, or that were refused"
            by = f" in {consumer}" if consumer else ""
            seen.conditions.append(Condition(POISON, queue, group, f"{queue}: new poison{by}: {what}"[:TEXT]))
    # Of the groups that are in other queues only nobody here can say that they are over: they are another project's, or of a
    # version that knows more queues. "" is what earlier versions wrote.
    seen.known.update((POISON, queue) for queue in (*mine, ""))


def dead(row: Subscriber) -> Condition | None:
    """The death of a subscriber, before it is buried; None: nobody needs to know."""
    if not row.receives or not settings.ALERTS or not settings.ALERTS.get("dead_worker", True):
        return None
    text = f"{row.queue}: the worker {row.host}:{row.process} died without a goodbye"
    return Condition(DEAD_WORKER, row.queue, row.host[:NAME], text[:TEXT])


def came_back(alias: str, queue: str, since: Any) -> bool:
    """Whether a worker lives that began after a death."""
    rows = Subscriber.objects.using(alias).filter(queue=queue, alive_until__gt=Now(), started_at__gt=since)
    return rows.exists()
