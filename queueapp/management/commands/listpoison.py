"""``manage.py listpoison``: the poison messages, for people or for scripts."""

from __future__ import annotations

import base64
import json
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db.models import QuerySet

from ...models import PoisonMessage
from ...poison.failures import read_failures


def add_selection(parser: ArgumentParser) -> None:
    """The options that choose poison messages, shared with ``requeuepoison``."""
    parser.add_argument("--queue", help="Only of this queue (label).")
    parser.add_argument("--group", help="Only of this group: same exception at the same place.")
    parser.add_argument("--consumer", help="Only of this consumer.")
    parser.add_argument("--database", default="default", help="Which database (default: 'default').")


def selected(options: dict[str, Any]) -> QuerySet[PoisonMessage]:
    """Unresolved poison messages by those options."""
    names = {"queue": "queue", "group": "group_key", "consumer": "consumer"}
    filters = {field: options[name] for name, field in names.items() if options[name]}
    rows = PoisonMessage.objects.using(options["database"])
    return rows.filter(status=PoisonMessage.Status.UNRESOLVED, **filters)


class Command(BaseCommand):
    """List poison messages."""

    help = (
        "List unresolved poison messages, newest first: number, queue, consumer, attempts, when and why. --json prints "
        "one object per line with headers, body (base64) and the history of attempts."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        add_selection(parser)
        parser.add_argument("--json", action="store_true", help="One JSON object per line.")
        parser.add_argument("--limit", type=int, default=100, help="At most so many (default 100).")

    def handle(self, *args: Any, **options: Any) -> None:
        if not 1 <= options["limit"] <= 1_000_000:
            raise CommandError(f"--limit {options['limit']} is not accepted: it must be from 1 to 1000000.")
        for row in selected(options).order_by("-failed_at", "-number")[: options["limit"]].iterator(chunk_size=500):
            if options["json"]:
                self.stdout.write(json.dumps(_as_dict(row)))
            else:
                when = f"{row.failed_at:%Y-%m-%d %H:%M:%S}"
                self.stdout.write(
                    f"{row.number}  {when}  {row.queue}  {row.consumer or '-'}  {row.attempts}x  {row.group_key[:8]}  {row.reason}"
                )


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
