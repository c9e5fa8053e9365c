"""The conditions that alerts are about: poison groups and their canaries, queues beyond their bounds, dead workers. An
unknown value neither opens an alert nor resolves one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from django.apps import apps

from .. import registry
from ..conf import settings
from ..errors import QueueNotFound
from ..models import LedgerCheck, Now, PoisonMessage, Subscriber, distinct_values
from ..operations import ledger, requeue_after_deploy, statistics
from ..sql import nonblocking

POISON, DEAD_WORKER, CANARY, AGE, DEPTH, LEDGER = "poison", "dead_worker", "canary", "age", "depth", "ledger"
#: The kinds of which the settings say only whether they are on.
SWITCHES = (POISON, CANARY, LEDGER, DEAD_WORKER)
#: Poison groups that have an alert of their own.
MAX_GROUPS = 200
#: Characters of a text and of a name.
TEXT, NAME = 500, 255


@dataclass(frozen=True)
class Condition:
    """A condition that holds. ``text`` is one line for people and has no word of any message. It states the rule, not
    the present value: it is still true while the alert is open. ``identity`` tells subjects of one name apart."""

    kind: str
    queue: str
    name: str
    text: str
    identity: str = ""

    @property
    def key(self) -> str:
        """The key of the alert. A poison group and a dead process have one alert each, whatever queues they concern."""
        queue = "" if self.kind in (POISON, DEAD_WORKER) else self.queue
        return hashlib.sha256(f"{self.kind}\0{queue}\0{self.name}\0{self.identity}".encode()).hexdigest()


@dataclass
class Evaluation:
    """The result of one evaluation. ``known``: the (kind, queue) whose other alerts are resolved."""

    conditions: list[Condition] = field(default_factory=list)
    known: set[tuple[str, str]] = field(default_factory=set)


def bound_of(name: str, queue: str) -> Any:
    """The bound of a queue, or the one for all queues; None without any. What is within a queue (``celery:mail``) has
    only a bound of its own: its messages are among those of the queue."""
    given = settings.ALERTS.get(name)
    if statistics.is_part(queue):
        return given.get(queue) if isinstance(given, dict) else None
    return given.get(queue, given.get("*")) if isinstance(given, dict) else given


def bounded_parts() -> set[str]:
    """The names of what is within a queue and has a bound."""
    given = [settings.ALERTS.get(name) for name in ("max_age", "max_waiting")]
    return {name for bounds in given if isinstance(bounds, dict) for name in bounds if statistics.is_part(name)}


def has_rule(kind: str, queue: str) -> bool:
    """Whether the settings have a rule for alerts of this kind about this queue."""
    if kind in SWITCHES:
        return bool(settings.ALERTS) and bool(settings.ALERTS.get(kind, True))
    bounds = {AGE: "max_age", DEPTH: "max_waiting"}
    return kind not in bounds or bound_of(bounds[kind], queue) is not None


def is_removed(label: str) -> bool:
    """Whether the queue is gone: its app is installed here and has no such queue. A queue of an app that is not
    installed may be another project's."""
    try:
        registry.queues.find(label)
    except QueueNotFound:
        app, _, name = label.partition(".")
        return bool(name) and any(config.label == app for config in apps.get_app_configs())
    return False


def evaluate(alias: str, queues: Iterable[Any]) -> Evaluation:
    """Evaluate all conditions but dead workers, whose alerts are opened when their leases are released."""
    found = Evaluation()
    by_label = {queue._meta.label: queue for queue in queues}
    if has_rule(POISON, ""):
        _poison(alias, set(by_label), found)
    if has_rule(CANARY, ""):
        _canaries(alias, set(by_label), found)
    if has_rule(LEDGER, "") and (with_ledger := ledger.with_ledger(by_label.values())):
        _ledgers(alias, with_ledger, found)
    bounded = [queue for label, queue in by_label.items() if has_rule(AGE, label) or has_rule(DEPTH, label)]
    for stats in [*(statistics.queue_stats(bounded) if bounded else ()), *_parts(alias)]:
        if stats.waiting is None:
            continue
        age: timedelta | None = bound_of("max_age", stats.queue)
        depth: int | None = bound_of("max_waiting", stats.queue)
        if age is not None:
            found.known.add((AGE, stats.queue))
            if stats.oldest_seconds is not None and stats.oldest_seconds > age.total_seconds():
                limit = statistics.span(age.total_seconds())
                text = f"{stats.queue}: the oldest message has waited for more than {limit}"
                found.conditions.append(Condition(AGE, stats.queue, "", text))
        if depth is not None:
            found.known.add((DEPTH, stats.queue))
            if stats.waiting > depth:
                messages = "message waits" if depth == 1 else "messages wait"
                text = f"{stats.queue}: more than {depth} {messages}"
                found.conditions.append(Condition(DEPTH, stats.queue, "", text))
    return found


def _parts(alias: str) -> list[statistics.QueueStats]:
    """The statistics of what is within a queue and has a bound. What can be read and has no row has no messages."""
    names = bounded_parts()
    if not names:
        return []
    rows, readable = statistics.parts_of(alias)
    return [
        rows.get(name) or statistics.QueueStats(name, "", alias, "", waiting=0)
        for name in sorted(names)
        if name.startswith(tuple(readable))
    ]


def _poison(alias: str, labels: set[str], found: Evaluation) -> None:
    unresolved = nonblocking(PoisonMessage.objects.using(alias)).filter(status=PoisonMessage.Status.UNRESOLVED)
    for number, group in enumerate(distinct_values(unresolved, "group_key"), 1):
        if number > MAX_GROUPS:
            return  # alerts about later groups are not known to be resolved
        row = (
            unresolved.filter(group_key=group, queue__in=labels).order_by("-number")
            .values_list("queue", "consumer", "exception_type").first()
        )  # fmt: skip
        if row is not None:
            queue, consumer, exception = row
            what = exception or "messages that could not be read or were refused"
            by = f" in {consumer}" if consumer else ""
            found.conditions.append(Condition(POISON, queue, group, f"{queue}: new poison{by}: {what}"[:TEXT]))
    # Only for queues of this project: a group in another queue belongs to another project, or to a version that knows
    # more queues.
    found.known.update((POISON, queue) for queue in labels)


def _canaries(alias: str, labels: set[str], found: Evaluation) -> None:
    for queue, group, version in requeue_after_deploy.failed(alias, labels):
        text = f"{queue}: version {version} still fails; the canary of a poison group has stopped"
        found.conditions.append(Condition(CANARY, queue, group, text[:TEXT], version))
    found.known.update((CANARY, queue) for queue in labels)


def _ledgers(alias: str, queues: list[Any], found: Evaluation) -> None:
    """By the last checks; one that could not be made leaves its alert as it is."""
    labels = [queue._meta.label for queue in queues]
    for row in LedgerCheck.objects.using(alias).filter(queue__in=labels, error="", checked_at__isnull=False):
        found.known.add((LEDGER, row.queue))
        if row.difference:
            found.conditions.append(Condition(LEDGER, row.queue, "", ledger.describe(row)[:TEXT]))


def dead_worker(alias: str, row: Subscriber) -> Condition | None:
    """The condition of a dead subscriber, once for its process; None if no alert is wanted."""
    if not row.receives or not has_rule(DEAD_WORKER, row.queue):
        return None
    # The process has a row for each of its queues, and the rows are released one after the other.
    rows = Subscriber.objects.using(alias).filter(host=row.host, process=row.process, process_start=row.process_start)
    queues = sorted({*rows.filter(receives=True).values_list("queue", flat=True), row.queue})
    name = f"{row.host}:{row.process}"
    text = f"worker {name} stopped without deregistering; it received {', '.join(queues)}"
    identity = row.process_start or str(row.supervisor)
    return Condition(DEAD_WORKER, row.queue, name[:NAME], text[:TEXT], identity)


def has_successor(alias: str, queue: str, since: Any) -> bool:
    """Whether a live worker of a queue started after a death."""
    rows = Subscriber.objects.using(alias).filter(queue=queue, alive_until__gt=Now(), started_at__gt=since)
    return rows.exists()
