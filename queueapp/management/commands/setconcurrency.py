"""``manage.py setconcurrency``: how many tasks of each worker process receive a queue."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import CommandError

from ... import registry
from ...conf import MAX_CONCURRENCY
from ...messages.escaping import in_one_line
from ...operations import control
from ..base_command import OperatorCommand


class Command(OperatorCommand):
    """Change how many messages a worker process handles at once."""

    help = (
        "Let each worker process receive a queue with so many tasks, whatever it was started with, or again with as many as "
        "it was started with (default). Seen within one peek delay, without a restart; tasks above it end with the message "
        "that they have in hand. A process has room for 32 tasks of a queue, or for as many as it was started with."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("queue", help="Queue by label or table.")
        parser.add_argument("tasks", help=f"A whole number from 1 to {MAX_CONCURRENCY}, or: default.")

    def handle(self, *args: Any, **options: Any) -> None:
        text = options["tasks"]
        # Longer ones are none that is accepted, and int() refuses the longest.
        tasks = int(text) if text.isdecimal() and len(text) < 10 else None
        if text != "default" and not 1 <= (tasks or 0) <= MAX_CONCURRENCY:
            shown = in_one_line(text, 40)
            raise CommandError(
                f"tasks {shown!r} is not accepted: it must be a whole number from 1 to {MAX_CONCURRENCY}, or: default."
            )
        queue = registry.queues.find(options["queue"])
        changed = control.set_concurrency(queue, tasks)
        said = "as many tasks as it was started with" if tasks is None else f"{tasks} tasks"
        self.stdout.write(f"{queue._meta.label}: each process has {said}{'' if changed else ', as before'}.")
