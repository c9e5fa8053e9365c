"""``manage.py requeuepoison``: put poison messages back into their queue."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import CommandError

from ... import registry
from ...errors import QueueNotFound
from ...failures import poison_operations
from ..base_command import OperatorCommand, counted
from .listpoison import add_selection, selected


class Command(OperatorCommand):
    """Requeue poison messages."""

    help = (
        "Put poison messages back into the queue that they came from (or --to another), in batches of one transaction "
        "each. Select them by number, --queue, --group or --consumer, or with --all. Counts are reset, so they get all "
        "their attempts; with --keep-counts they get one."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("number", nargs="*", type=int, help="Poison messages by number (see listpoison).")
        parser.add_argument("--all", action="store_true", help="Every unresolved poison message.")
        add_selection(parser)
        parser.add_argument("--to", help="Another queue (label or table).")
        parser.add_argument("--keep-counts", action="store_true", help="Keep deliveries and history: one more attempt.")
        parser.add_argument("--dry-run", action="store_true", help="Only print how many would be requeued.")

    def handle(self, *args: Any, **options: Any) -> None:
        chosen = options["number"] or options["queue"] or options["group"] or options["consumer"]
        rows = selected(options)
        if bool(chosen) == options["all"]:
            raise CommandError("Select messages by number, --queue, --group or --consumer, or use --all.")
        found: set[int] = set()
        missing: list[int] = []
        if options["number"]:
            rows = rows.filter(number__in=options["number"])
            found = set(rows.values_list("number", flat=True))
            missing = sorted(set(options["number"]) - found)
        try:
            to = registry.queues.find(options["to"]) if options["to"] else None
            if options["dry_run"]:
                self.stdout.write(f"{rows.count()} poison messages would be requeued.")
                return
            with self.counting("requeued", _stopped) as progress:
                done = poison_operations.requeue(
                    rows, to=to, reset_counts=not options["keep_counts"], progress=progress.at
                )
        except QueueNotFound as error:
            raise CommandError(f"{error} Use --to to name another queue.") from error
        self.stdout.write(f"{done} poison messages were requeued.")
        if missing:
            raise CommandError(
                f"No unresolved poison message of those chosen has the number {', '.join(map(str, missing))} (see "
                "listpoison)."
            )
        if done < len(found):
            raise CommandError(f"{counted(len(found) - done, 'selected message')} changed meanwhile (see listpoison).")


def _stopped(done: int) -> str:
    return f"{done} poison messages were requeued, the others are unchanged."
