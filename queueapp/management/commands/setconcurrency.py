"""``manage.py setconcurrency``: how many receivers each worker process has for a queue."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import CommandError

from ... import registry
from ...conf import MAX_CONCURRENCY
from ...messages.escaping import in_one_line
from ...operations import control
from ..base_command import OperatorCommand, counted


class Command(OperatorCommand):
    """Change how many messages a worker process handles at once."""

    help = (
        "Set the number of receivers that each worker process has for a queue, in place of the number that it was "
        "started with; default: back to that number. Workers apply it within one peek delay, without a restart; a "
        "receiver above the number stops after its current message. A process has at most 32 receivers for a queue, or "
        "as many as it was started with."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("queue", help="Queue by label or table.")
        parser.add_argument("receivers", help=f"A whole number from 1 to {MAX_CONCURRENCY}, or: default.")

    def handle(self, *args: Any, **options: Any) -> None:
        text = options["receivers"]
        # A longer number is out of range in any case, and int() refuses the longest.
        receivers = int(text) if text.isdecimal() and len(text) < 10 else None
        if text != "default" and not 1 <= (receivers or 0) <= MAX_CONCURRENCY:
            shown = in_one_line(text, 40)
            raise CommandError(
                f"receivers {shown!r} is not accepted: it must be a whole number from 1 to {MAX_CONCURRENCY}, or: "
                "default."
            )
        queue = registry.queues.find(options["queue"])
        changed = control.set_concurrency(queue, receivers)
        number = "as many receivers as it was started with" if receivers is None else counted(receivers, "receiver")
        self.stdout.write(f"{queue._meta.label}: each process has {number}{'' if changed else ', as before'}.")
