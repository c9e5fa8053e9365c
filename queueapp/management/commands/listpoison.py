"""``manage.py listpoison``: the poison messages, for people or for scripts."""

from __future__ import annotations

import base64
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import CommandError
from django.db.models import QuerySet

from ... import registry
from ...errors import QueueNotFound
from ...failures.history import read_failures
from ...messages.escaping import in_one_line
from ...models import PoisonMessage
from ...sql import nonblocking
from ..base_command import OperatorCommand

#: Characters of a name and of a reason in a line.
NAME, REASON = 200, 300


def add_selection(parser: ArgumentParser) -> None:
    """The options that choose poison messages, shared with ``requeuepoison``."""
    parser.add_argument("--queue", help="Only of this queue (label or table).")
    parser.add_argument("--group", help="Only of this group: same exception at the same place.")
    parser.add_argument("--consumer", help="Only of this consumer.")
    parser.add_argument("--database", default="default", help="Which database (default: 'default').")


def selected(options: dict[str, Any]) -> QuerySet[PoisonMessage]:
    """The unresolved poison messages of these options. Raises CommandError for an empty one."""
    for name in ("queue", "group", "consumer"):
        if options[name] == "":  # an empty variable of a script would select everything
            raise CommandError(f"--{name} '' is not accepted: it is empty. Leave the option out to select any.")
    names = {"group": "group_key", "consumer": "consumer"}
    filters = {field: options[name] for name, field in names.items() if options[name]}
    rows = PoisonMessage.objects.using(options["database"]).filter(status=PoisonMessage.Status.UNRESOLVED, **filters)
    return rows.filter(queue=_label(options["queue"], options["database"])) if options["queue"] else rows


def _label(name: str, database: str) -> str:
    """The label of a queue by label or table; for a queue that does not exist, the name in its poison messages. Raises
    QueueNotFound."""
    try:
        label: str = registry.queues.find(name)._meta.label
    except QueueNotFound:
        if not nonblocking(PoisonMessage.objects.using(database)).filter(queue=name).exists():
            raise
        return name
    return label


class Command(OperatorCommand):
    """List poison messages."""

    help = (
        "List unresolved poison messages, newest first: number, queue, consumer, attempts, time and reason. --json "
        "prints one object per line with headers, body (base64) and the history of attempts. Long reasons are "
        "shortened; a line on stderr says if there are more messages than --limit. Control characters from messages "
        "are shown by their code points."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        add_selection(parser)
        parser.add_argument("--json", action="store_true", help="One JSON object per line.")
        parser.add_argument("--limit", type=int, default=100, help="Maximum number of messages (default 100).")

    def handle(self, *args: Any, **options: Any) -> None:
        if not 1 <= options["limit"] <= 1_000_000:
            raise CommandError(f"--limit {options['limit']} is not accepted: it must be from 1 to 1000000.")
        limit = options["limit"]
        rows = nonblocking(selected(options)).order_by("-failed_at", "-number")
        for shown, row in enumerate(rows[: limit + 1].iterator(chunk_size=500)):
            if shown == limit:
                self.stderr.write(f"Only the newest {limit} are shown; there are more (see --limit).")
                break
            if options["json"]:
                self.write_json(_as_dict(row))
            else:
                self.stdout.write(_as_line(row))


def _as_line(row: PoisonMessage) -> str:
    when, consumer = f"{row.failed_at:%Y-%m-%d %H:%M:%S}", in_one_line(row.consumer, NAME) or "-"
    what = f"{in_one_line(row.queue, NAME)}  {consumer}  {row.attempts}x  {in_one_line(row.group_key[:8], 8)}"
    return f"{row.number}  {when}  {what}  {in_one_line(row.reason, REASON)}"


def _as_dict(row: PoisonMessage) -> dict[str, Any]:
    return {
        "number": row.number,
        "message_id": str(row.message_id),
        "queue": row.queue,
        "destination": row.destination,
        "consumer": row.consumer,
        "message_type": row.message_type,
        "reason": row.reason,
        "attempts": row.attempts,
        "exception_type": row.exception_type,
        "exception_message": row.exception_message,
        "traceback": row.traceback,
        "group": row.group_key,
        "first_failed_at": row.first_failed_at.isoformat() if row.first_failed_at else None,
        "failed_at": row.failed_at.isoformat(),
        "host": row.host,
        "process": row.process,
        "worker_version": row.worker_version,
        "headers": row.headers,
        "body": None if row.body is None else base64.b64encode(row.body).decode(),
        "failures": read_failures(row.failures),
    }
