"""``manage.py movemessages``: move the unroutable messages of a type."""

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
        "Move the messages of a type without a consumer (see queuestats) out of a queue: to another queue of the same "
        "database, where they have all their attempts and a new age (Delivery.expiration), or to poison, where they "
        "stay until an operator requeues, edits or archives them. In batches of one transaction each; messages in "
        "flight stay. For messages to a missing "
        "consumer use removeconsumer, for delayed messages movedelayed, for poison requeuepoison --to."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("queue", help="Queue by label or table.")
        parser.add_argument(
            "--type", required=True, metavar="NAME", help="The type as queuestats names it; '': messages without one."
        )
        where = parser.add_mutually_exclusive_group(required=True)
        where.add_argument("--to", metavar="QUEUE", help="The new queue (label or table).")
        where.add_argument("--poison", action="store_true", help="Move them to poison.")
        parser.add_argument("--dry-run", action="store_true", help="Only print how many would be moved.")

    def handle(self, *args: Any, **options: Any) -> None:
        queue, kind = registry.queues.find(options["queue"]), options["type"]
        to = registry.queues.find(options["to"]) if options["to"] else None
        target = to._meta.label if to else "poison"
        of_type = f"of type {in_one_line(kind, 200)!r}" if kind else "without a type"
        what = f"messages {of_type} of {queue._meta.label}"
        present = move_messages.count_of_type(queue, kind)
        if options["dry_run"]:
            self.stdout.write(f"{present} {what} would go to {target}.")
            return
        move = partial(move_messages.move_type, to=to) if to else move_messages.move_type_to_poison
        with self.counting("moved", lambda done: f"{done} {what} went to {target}.") as progress:
            done = move(queue, kind, progress=progress.at)
        waits = "in flight or with a dedupe key that waits there" if to and to.delivery.dedupe_key else "in flight"
        stay = f"; {present - done} {waits} stay" if done < present else ""
        self.stdout.write(f"{done} {what} went to {target}{stay}.")
