"""``manage.py pausequeue``: stop the workers from receiving from a queue."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from ... import registry
from ...operations import control
from ..base_command import OperatorCommand


class Command(OperatorCommand):
    """Pause queues."""

    help = "Pause queues: workers stop receiving from them within one peek delay, sending goes on. See resumequeue."
    change = staticmethod(control.pause)
    done, already = "paused", "was paused already"

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("queue", nargs="+", help="Queues by label or table.")

    def handle(self, *args: Any, **options: Any) -> None:
        queues = [registry.queues.find(name) for name in options["queue"]]
        for queue in queues:
            changed = type(self).change(queue)
            self.stdout.write(f"{queue._meta.label} {self.done if changed else self.already}.")
