"""``manage.py movemessages``: take messages of a type that nobody takes elsewhere."""

from __future__ import annotations

from argparse import ArgumentParser
from functools import partial
from typing import Any

from ... import registry
from ...messages.escaping import in_one_line
from ...operations import move_messages
from ..base_command import OperatorCommand


class Command(OperatorCommand):
    """Move messages of one type."""

    help = (
        "Move the messages of one type out of a queue in which nobody takes it (see queuestats): to another queue of the same "
        "database, where they have all their attempts, or to poison, where they are kept until somebody requeues, edits or "
        "archives them. In batches of one transaction each; what somebody has in hand stays. What is addressed to a consumer that "
        "nobody has is moved by removeconsumer, delayed messages by movedelayed, poison by requeuepoison --to."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("queue", help="Queue by label or table.")
        parser.add_argument(
            "--type", required=True, metavar="NAME", help="The type as queuestats names it; '': messages without one."
        )
        where = parser.add_mutually_exclusive_group(required=True)
        where.add_argument("--to", metavar="QUEUE", help="The queue they go to (label or table).")
        where.add_argument("--poison", action="store_true", help="They become poison.")
        parser.add_argument("--dry-run", action="store_true", help="Only say how many would be moved.")

    def handle(self, *args: Any, **options: Any) -> None:
        queue, kind = registry.queues.find(options["queue"]), options["type"]
        to = registry.queues.find(options["to"]) if options["to"] else None
        place = to._meta.label if to else "poison"
        of_type = f"of type {in_one_line(kind, 200)!r}" if kind else "without a type"
        what = f"messages {of_type} of {queue._meta.label}"
        there = move_messages.count_of_type(queue, kind)
        if options["dry_run"]:
            self.stdout.write(f"{there} {what} would go to {place}.")
            return
        move = partial(move_messages.move_type, to=to) if to else move_messages.move_type_to_poison
        with self.counting("moved", lambda done: f"{done} {what} went to {place}.") as progress:
            done = move(queue, kind, progress=progress.at)
        stay = f"; {there - done} that somebody has in hand stay" if done < there else ""
        self.stdout.write(f"{done} {what} went to {place}{stay}.")
