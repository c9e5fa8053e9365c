"""``manage.py rehearse``: run messages through the handlers of this code, in transactions that are rolled back."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from django.core.management.base import CommandError

from ... import registry
from ...messages.escaping import in_one_line
from ...models import DelayedMessage
from ...operations.rehearsal import Rehearsal, rehearse
from ...sql import nonblocking
from ..base_command import OperatorCommand, counted
from .listpoison import add_selection, selected

#: Characters of a line.
LINE = 500


class Command(OperatorCommand):
    """Rehearse messages."""

    help = (
        "Handle poison messages (by number, --queue, --group or --consumer), or waiting ones (--waiting QUEUE, "
        "--delayed QUEUE), by the handlers of this code, each in a transaction that is rolled back, and report rows "
        "changed, messages it would have sent, and the exception. Nothing is acked or moved. Exit code 1: one failed, "
        "or has no consumer here."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("number", nargs="*", type=int, help="Poison messages by number (see listpoison).")
        add_selection(parser)
        parser.add_argument("--waiting", metavar="QUEUE", help="The first messages that wait in this queue.")
        parser.add_argument("--delayed", metavar="QUEUE", help="The first delayed messages for this queue.")
        parser.add_argument("--limit", type=int, default=10, help="Maximum number of messages (default 10).")
        parser.add_argument("--body", type=Path, metavar="FILE", help="Rehearse with this body, for one message.")
        parser.add_argument("--headers", metavar="JSON", help="Rehearse with these headers, for one message.")
        parser.add_argument(
            "--network", action="store_true", help="Let handlers open sockets and start programs; refused by default."
        )
        parser.add_argument("--json", action="store_true", help="One JSON object per message.")

    def handle(self, *args: Any, **options: Any) -> None:
        keys, rows = self._selected(options)
        if not keys:
            raise CommandError("No message matches.")
        changed = self._edited(options, len(keys))
        failed = 0
        for key in keys:
            # One by one: a list of large bodies might not fit into memory.
            row = rows.filter(pk=key).first()
            if row is None:
                continue
            found = rehearse(row, network=options["network"], **changed)
            failed += not found.succeeded
            if options["json"]:
                self.write_json({"key": row.pk, **found.as_dict()})
            else:
                for line in _report(row.pk, found):
                    self.stdout.write(in_one_line(line, LINE))
        if failed:
            raise CommandError(f"{counted(failed, 'message')} of {len(keys)} could not be handled.")

    def _selected(self, options: dict[str, Any]) -> tuple[list[Any], Any]:
        """The keys of the messages, and the rows that they are of."""
        poison = bool(options["number"] or options["queue"] or options["group"] or options["consumer"])
        if poison + bool(options["waiting"]) + bool(options["delayed"]) != 1:
            raise CommandError("Select poison messages, or --waiting QUEUE, or --delayed QUEUE.")
        if not 1 <= options["limit"] <= 100_000:
            raise CommandError(f"--limit {options['limit']} is not accepted: it must be from 1 to 100000.")
        if poison:
            rows: Any = selected(options).order_by("number")
            if options["number"]:
                rows = rows.filter(number__in=options["number"])
        else:
            queue = registry.queues.find(options["waiting"] or options["delayed"])
            if options["waiting"]:
                rows = nonblocking(queue.objects.order_by("seq"))
            else:
                delayed = DelayedMessage.objects.using(options["database"])
                rows = nonblocking(delayed.filter(destination=queue._meta.label))
        return list(rows.values_list("pk", flat=True)[: options["limit"]]), rows

    def _edited(self, options: dict[str, Any], count: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if options["body"] is not None:
            try:
                found["body"] = options["body"].read_bytes()
            except OSError as error:
                raise CommandError(f"--body {options['body']}: {error.strerror}.") from error
        if options["headers"] is not None:
            try:
                found["headers"] = {str(name): str(value) for name, value in json.loads(options["headers"]).items()}
            except (ValueError, AttributeError) as error:
                raise CommandError("--headers is not accepted: it must be a JSON object of strings.") from error
        if found and count != 1:
            raise CommandError(f"--body and --headers are for one message, and {count} are selected.")
        return found


def _report(key: Any, found: Rehearsal) -> Iterator[str]:
    yield f"{key}  {found.queue}  {found.consumer or '-'}  {found.result}  ({found.seconds:.3f} s)"
    for line in found.effects():
        yield f"    {line}"
