"""``manage.py movedelayed``: send the delayed messages for one queue to another, such as those for a removed queue."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from ... import delayed, registry
from ...messages.escaping import in_one_line
from ...operations import move_messages
from ..base_command import OperatorCommand


class Command(OperatorCommand):
    """Readdress delayed messages."""

    help = (
        "Send the delayed messages for one queue to another queue when they are due, for example those for a queue "
        "whose class was renamed or removed, which are not delivered any more (see queuestats). In batches of one "
        "transaction each. requeuepoison --to does the same for poison."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("source", help="Their destination, as queuestats names it. The queue need not exist.")
        parser.add_argument("queue", help="The new queue (label or table).")
        parser.add_argument("--database", default="default", help="Database of the messages (default: 'default').")
        parser.add_argument("--dry-run", action="store_true", help="Only print how many would be moved.")

    def handle(self, *args: Any, **options: Any) -> None:
        source, queue, alias = options["source"], registry.queues.find(options["queue"]), options["database"]
        name = delayed.address_in(alias, queue)
        if options["dry_run"]:
            self.stdout.write(f"{delayed.addressed(source, using=alias)} delayed messages would go to {name}.")
            return
        with self.counting("moved", lambda moved: f"{moved} delayed messages go to {name} now.") as progress:
            move_messages.move_delayed(source, queue, using=alias, progress=progress.at)
        self.stdout.write(f"{progress.count} delayed messages of {in_one_line(source, 200)} go to {name} now.")
