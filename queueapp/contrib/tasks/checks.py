"""System checks of a backend in ``TASKS``; Django calls them for every alias. docs/checks.md lists all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.apps import apps
from django.core.checks import CheckMessage, Error, Warning
from django.db import connections, router

from ...errors import InvalidOption, QueueNotFound
from ...models import Semantics
from .task_options import OWN_QUEUE

NEEDED = ("id", "headers", "body", "enqueued_at", "failures", "lease_token", "lease_owner", "lease_expires")


def check_backend(backend: Any) -> Iterator[CheckMessage]:
    """E070: the app is not installed. E071: an option is not accepted. E072: the queue does not exist. E073: its table
    cannot hold tasks. E074: "work" names unknown queues. E075: the database does not exist. E076: the results table
    cannot be in the queue's database. W070: too few priorities. W071: no index on the id. W072: workers consume none of
    its queues. W073: the queue does not retry."""
    where = f"TASKS[{backend.alias!r}]"
    if not apps.is_installed("queueapp.contrib.tasks"):
        yield Error(
            f"{where}: the tables of tasks belong to the app queueapp.contrib.tasks, which is not in INSTALLED_APPS.",
            hint="Add 'queueapp.contrib.tasks' to INSTALLED_APPS and run `manage.py migrate`.",
            id="queueapp.E070",
        )
        return
    try:
        configuration = backend.configuration
    except InvalidOption as error:
        yield Error(str(error), id="queueapp.E071")
        return
    if configuration.work is not None and backend.queues:
        unknown = sorted({*configuration.work} - backend.queues)
        if unknown:
            yield Error(
                f"{where}['OPTIONS']['work'] names {', '.join(map(repr, unknown))}, and QUEUES does not.",
                id="queueapp.E074",
            )
        elif not configuration.work:
            yield Warning(f"{where}['OPTIONS']['work'] is empty: workers run none of its tasks.", id="queueapp.W072")
    named = configuration.enqueue_on_commit
    if named and named not in connections:
        yield Error(
            f"{where}['OPTIONS']['enqueue_on_commit'] = {named!r} is not an alias of DATABASES.", id="queueapp.E075"
        )
    try:
        queue = backend.queue
    except QueueNotFound as error:
        yield Error(f"{where}['OPTIONS']['queue']: {error}", id="queueapp.E072")
        return
    yield from _check_queue(where, queue, configuration)


def _check_queue(where: str, queue: Any, configuration: Any) -> Iterator[CheckMessage]:
    from .models import Result  # here: the caller has checked that its app is installed

    label, delivery = queue._meta.label, queue.delivery
    fields = {field.name for field in queue._meta.local_concrete_fields}
    lacking = [name for name in NEEDED if name not in fields]
    if lacking or queue.wire_format:
        why = f"it has no {', '.join(lacking)}" if lacking else f"its wire format is {queue.wire_format!r}"
        yield Error(f"{where}: {label} cannot hold tasks: {why}.", obj=queue, id="queueapp.E073")
        return
    alias = router.db_for_write(queue)
    if not router.allow_migrate_model(alias, Result):
        yield Error(
            f"{where}: {label} is in the database {alias!r}, where the router allows no table of "
            "queueapp.contrib.tasks. Results are written to the queue's database, in the transaction of the ack.",
            hint=(
                "Let the router allow the app queueapp_tasks in that database, and run `manage.py migrate "
                "--database` for it."
            ),
            obj=queue,
            id="queueapp.E076",
        )
    if delivery.priorities < 3:
        yield Warning(
            f"{where}: {label} has {delivery.priorities} level(s), so tasks of different priorities share one.",
            hint="Set Delivery.priorities to 3 or more (TaskQueue has 10).",
            obj=queue,
            id="queueapp.W070",
        )
    first = {index.fields[0] for index in queue._meta.indexes if index.fields and index.condition is None}
    if configuration.keeps_results and "id" not in first and label != OWN_QUEUE:
        yield Warning(
            f"{where}: {label} has no index on id, so get_result() reads the whole table.",
            hint="Derive it from queueapp.contrib.tasks.models.TaskQueueBase, or add models.Index(fields=['id'], ...).",
            obj=queue,
            id="queueapp.W071",
        )
    if delivery.semantics is Semantics.AT_MOST_ONCE and (configuration.recoverability.get("attempts") or 1) > 1:
        yield Warning(
            f"{where}: {label} is AT_MOST_ONCE, which does not retry: 'attempts' has no effect.",
            obj=queue,
            id="queueapp.W073",
        )
