"""Tasks that a schedule enqueues, in the transaction that records its run."""

from __future__ import annotations

import json
import uuid
from typing import Any

from ...errors import InvalidOption, UndecodableMessage
from ...models import Schedule
from ...schedules import declarations, stored
from ...sending.validation import alias_of
from .backend import QueueBackend
from .compat import DEFAULT_TASK_BACKEND_ALIAS, task_backends
from .serialization import task_at


def install() -> None:
    """Let ``@scheduled`` stand above tasks, and dispatchers enqueue them."""
    declarations.queue_of_task = lambda task: _backend(task.backend).queue
    stored.enqueue_task = enqueue


def enqueue(row: Schedule, alias: str) -> uuid.UUID:
    """Enqueue the task of a schedule in the open transaction; returns the id of its result. Raises InvalidOption, and
    InvalidTask."""
    try:
        given, using = json.loads(row.body), json.loads(row.options or "{}")
        args, kwargs = list(given["args"]), dict(given["kwargs"])
        backend = _backend(using.pop("backend", DEFAULT_TASK_BACKEND_ALIAS))
        task = task_at(row.task, backend.configuration.modules)
    except (ValueError, KeyError, TypeError, UndecodableMessage) as error:
        accepted = f"a task with arguments and options that are JSON objects ({error})"
        raise InvalidOption(f"task of schedule {row.name!r}", row.task, accepted) from None
    if alias_of(backend.queue) != alias:
        accepted = f"of a queue in {alias!r}, where its schedule is stored"
        raise InvalidOption(f"task of schedule {row.name!r}", row.task, accepted)
    task = task.using(backend=backend.alias, **using)
    return uuid.UUID(backend.enqueue_scheduled(task, args, kwargs).id)


def _backend(alias: str) -> Any:
    found: Any = task_backends[alias] if alias in task_backends.settings else None
    if not isinstance(found, QueueBackend):
        accepted = "the name of a queueapp.contrib.tasks.QueueBackend in TASKS"
        raise InvalidOption("backend of a scheduled task", alias, accepted)
    return found
