"""``manage.py purgequeue``: delete the waiting messages of a queue, or only the expired ones."""

from __future__ import annotations

from argparse import ArgumentParser
from functools import partial
from typing import Any

from django.db import router

from ... import registry
from ...operations.control import purge_batch
from ...operations.expiration import delete_expired
from ..base_command import OperatorCommand

BATCH = 3000


class Command(OperatorCommand):
    """Purge a queue."""

    help = (
        "Delete the messages of a queue that are neither leased nor locked, in batches. Asks for confirmation unless "
        "--yes. --expired deletes only expired messages, without asking. Delayed and poison messages stay."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("queue", help="Queue by label or table.")
        parser.add_argument("--expired", action="store_true", help="Delete expired messages only.")
        parser.add_argument(
            "--yes", "--no-input", "--noinput", action="store_true", help="Do not ask for confirmation."
        )

    def handle(self, *args: Any, **options: Any) -> None:
        queue = registry.queues.find(options["queue"])
        label = queue._meta.label
        if not options["expired"] and not options["yes"]:
            self.confirm(f"Delete all waiting messages of {label}? Type the label to confirm: ", label, "--yes")
        step = partial(delete_expired if options["expired"] else purge_batch, queue, router.db_for_write(queue))
        with self.counting("deleted", lambda total: f"{total} messages of {label} were deleted.") as progress:
            while count := step(BATCH):
                progress.at(progress.count + count)
        self.stdout.write(
            f"{progress.count} {'expired ' if options['expired'] else ''}messages of {label} were deleted."
        )
