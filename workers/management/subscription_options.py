"""The options of a subscription on the command line: ``--backlog`` and ``--filter``, by queue, and ``--consumer``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.core.management.base import CommandError

from queueapp import registry
from queueapp.consuming.registry import registered
from queueapp.errors import QueueNotFound
from queueapp.flow.filters import SubscriberFilter
from queueapp.messages.escaping import in_one_line
from queueapp.models.delivery.options import MOST_OUTSTANDING


def read_backlogs(given: Sequence[str], queues: Sequence[Any]) -> dict[str, int]:
    """Limits by the label of a queue; a limit for a queue takes precedence over one for all. Raises CommandError."""
    for_all: dict[str, int] = {}
    for_queue: dict[str, int] = {}
    for text in given:
        name, _, number = text.rpartition("=")
        # Longer numbers exceed the limit, and int() refuses the longest.
        count = int(number) if number.isascii() and number.isdecimal() and len(number) < 10 else -1
        if not 0 <= count <= MOST_OUTSTANDING:
            raise CommandError(
                f"--backlog {in_one_line(text, 80)!r} is not accepted: it must be N or QUEUE=N, N a whole number from "
                "0 to "
                f"{MOST_OUTSTANDING}."
            )
        if name:
            for_queue[_label("--backlog", name, queues)] = count
        else:
            for_all = {queue._meta.label: count for queue in queues}
    return for_all | for_queue


def read_filters(given: Sequence[str], queues: Sequence[Any]) -> dict[str, str]:
    """Expressions by the label of a queue. Raises CommandError, which shows the position of an error in the
    expression."""
    filters: dict[str, str] = {}
    for text in given:
        name, _, expression = text.partition("=")
        if not name or not expression.strip():
            raise CommandError(f"--filter {in_one_line(text, 80)!r} is not accepted: it must be QUEUE=EXPRESSION.")
        label = _label("--filter", name, queues)
        if label in filters:
            raise CommandError(f"--filter names {label} twice: write one expression with AND.")
        try:
            SubscriberFilter(expression, label)
        except (ValueError, ImportError) as error:
            raise CommandError(f"--filter of {label}: {error}") from error
        filters[label] = expression
    return filters


def read_consumers(given: Sequence[str], queues: Sequence[Any]) -> list[str]:
    """The names of the consumers to run. Raises CommandError for a name that no received queue has."""
    for name in given:
        if not any(has_one_of(queue, [name]) for queue in queues or registered.queues()):
            known = sorted(entry.name for queue in queues or registered.queues() for entry in registered.of(queue))
            raise CommandError(
                f"--consumer {in_one_line(name, 200)!r} is not accepted: the consumers of these queues are "
                f"{', '.join(known) or 'none'}."
            )
    return list(dict.fromkeys(given))


def has_one_of(queue: Any, names: Sequence[str]) -> bool:
    """Whether a queue has one of these consumers."""
    return any(consumer.name in names for consumer in registered.of(queue))


def _label(option: str, name: str, queues: Sequence[Any]) -> str:
    try:
        queue = registry.queues.find(name)
    except QueueNotFound as error:
        raise CommandError(f"{option}: {error}") from error
    if queue not in queues:
        raise CommandError(f"{option} names {queue._meta.label}, which is not received here.")
    label: str = queue._meta.label
    return label
