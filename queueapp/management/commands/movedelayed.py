"""``manage.py movedelayed``: let delayed messages of one queue go to another, such as those of a queue that is no more."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from ... import delayed, registry
from ...messages.escaping import in_one_line
from ..base_command import OperatorCommand

BATCH = 1000


class Command(OperatorCommand):
    """Readdress delayed messages."""

    help = (
        "Let the delayed messages that are kept for one queue go to another when they are due, in batches of one transaction "
        "each: those of a queue whose class was renamed or removed, say, which nobody delivers any more (see queuestats). "
        "requeuepoison --to does the same for poison."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "source", help="The destination that they have, as queuestats names it; no such queue need exist."
        )
        parser.add_argument("queue", help="The queue they go to (label or table).")
        parser.add_argument("--database", default="default", help="Which database keeps them (default: 'default').")
        parser.add_argument("--dry-run", action="store_true", help="Only say how many would be moved.")

    def handle(self, *args: Any, **options: Any) -> None:
        source, queue, alias = options["source"], registry.queues.find(options["queue"]), options["database"]
        name = delayed.address_in(alias, queue)
        if options["dry_run"]:
            self.stdout.write(f"{delayed.addressed(source, using=alias)} delayed messages would go to {name}.")
            return
        with self.counting("moved", lambda moved: f"{moved} delayed messages go to {name} now.") as progress:
            while count := delayed.readdress(source, queue, using=alias, limit=BATCH):
                progress.at(progress.count + count)
        self.stdout.write(f"{progress.count} delayed messages of {in_one_line(source, 200)} go to {name} now.")
