"""``manage.py replay``: read the journal, as text, as JSON, or into a queue."""

from __future__ import annotations

import base64
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from django.core.management.base import CommandError
from django.db import connections, router, transaction

from ... import registry
from ...errors import UndecodableMessage
from ...journal.replay_reader import Entry, Replay, replay
from ...messages.escaping import in_one_line
from ...topics.backfill import evaluated, insert
from ..base_command import OperatorCommand

#: Characters of a body in a line, and messages inserted in one transaction.
SHOWN, BATCH = 200, 500


class Command(OperatorCommand):
    """Replay a topic."""

    help = """Read the publications of a journaled topic (QUEUEAPP["JOURNAL"]) in their order.

  manage.py replay orders                                    all kept messages, a line each
  manage.py replay '^orders' --since 2026-11-22T10:00:00Z    several topics, from a time on
  manage.py replay orders --since 4711 --limit 10            the ten behind bookmark 4711
  manage.py replay orders --filter '/total > 100' --json     one JSON object per line, the body in base64
  manage.py replay orders --since now --follow               new publications, until Ctrl-C
  manage.py replay orders --since 4711 --to shop.Orders      into a queue again

The journal and the other queues do not change. --to inserts copies into a queue, without regard to the messages that
it has, by its present filter and options, in transactions of 500; if it is interrupted, it prints the bookmark to
continue with. (rebuildqueue fills a queue with messages that it never had.)"""

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> Any:
        return super().create_parser(prog_name, subcommand, formatter_class=RawDescriptionHelpFormatter, **kwargs)

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("topic", help="A topic, or a regular expression that is searched in the names of topics.")
        parser.add_argument(
            "--since",
            default="epoch",
            help="Start: epoch (default), now, a bookmark (starts after it), or an ISO-8601 timestamp (UTC unless it "
            "has a "
            "zone).",
        )
        parser.add_argument("--filter", help="Only messages that this expression matches.")
        parser.add_argument("--limit", type=int, help="Maximum number of messages.")
        parser.add_argument("--follow", action="store_true", help="Wait for new publications.")
        parser.add_argument("--rate", type=float, help="Maximum messages per second.")
        parser.add_argument(
            "--bookmark-not-found",
            choices=["now", "epoch", "fail"],
            default="fail",
            help="Start for a bookmark that the journal does not have (default: fail).",
        )
        where = parser.add_mutually_exclusive_group()
        where.add_argument("--to", metavar="QUEUE", help="Insert the messages into this queue (label or table).")
        where.add_argument("--json", action="store_true", help="One JSON object per line.")
        parser.add_argument(
            "--database", help="Database of the journal (default: the queue's, or that of queueapp's tables)."
        )

    def handle(self, *args: Any, **options: Any) -> None:
        if options["limit"] is not None and options["limit"] < 1:
            raise CommandError(f"--limit {options['limit']} is not accepted: 1 or more.")
        queue = registry.queues.find(options["to"]) if options["to"] else None
        alias = options["database"] or (router.db_for_write(queue) if queue else None)
        reading = replay(
            options["topic"],
            options["since"],
            filter=options["filter"],
            follow=options["follow"],
            rate=options["rate"],
            bookmark_not_found=options["bookmark_not_found"],
            using=alias,
        )
        with reading:
            entries: Iterator[Entry] = islice(reading, options["limit"])
            if queue is not None:
                self._send(queue, reading, entries)
            else:
                self._print(entries, options["json"])

    def _print(self, entries: Iterable[Entry], as_json: bool) -> None:
        for entry in entries:
            if as_json:
                self.write_json(entry_as_json(entry))
            else:
                self.stdout.write(as_line(entry))
            self.stdout.flush()

    def _send(self, queue: Any, reading: Replay, entries: Iterator[Entry]) -> None:
        alias = reading.alias
        last = None

        def stopped(sent: int) -> str:
            on = f" Continue with --since {last}." if last is not None else ""
            return f"{sent} messages were inserted into {queue._meta.label}.{on}"

        with self.counting("messages", stopped) as progress:
            while part := list(islice(entries, BATCH if not reading.follows else 1)):
                wanted = [
                    message for message in (evaluated(queue, entry.record) for entry in part) if message is not None
                ]
                sent = 0
                if wanted:
                    with transaction.atomic(using=alias):
                        sent = insert(queue, connections[alias], wanted)
                last = part[-1].bookmark
                progress.at(progress.count + sent)
        self.stdout.write(f"{progress.count} messages were inserted into {queue._meta.label}.")


def as_line(entry: Entry) -> str:
    """An entry as a line."""
    try:
        kind = entry.type_name
    except UndecodableMessage:
        kind = "?"
    body = (entry.body or b"")[: 4 * SHOWN].decode("utf-8", "backslashreplace")
    shown = [str(entry.bookmark), entry.published_at.isoformat(), in_one_line(entry.topic, SHOWN), str(entry.id)]
    return "  ".join(filter(None, [*shown, in_one_line(kind, SHOWN), in_one_line(body, SHOWN)]))


def entry_as_json(entry: Entry) -> dict[str, Any]:
    """An entry for scripts."""
    record = entry.record
    try:
        headers: Any = entry.headers
    except UndecodableMessage:
        headers = record.headers
    return {
        "bookmark": entry.bookmark,
        "topic": entry.topic,
        "id": str(entry.id),
        "published_at": entry.published_at.isoformat(),
        "expires": record.expires.isoformat() if record.expires else None,
        "headers": headers,
        "body": None if entry.body is None else base64.b64encode(entry.body).decode(),
    }
