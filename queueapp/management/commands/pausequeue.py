"""``manage.py pausequeue``: let no worker receive a queue."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from ... import registry
from ...errors import QueueNotFound
from ...operating import control


class Command(BaseCommand):
    """Pause queues."""

    help = "Pause queues: workers take nothing from them, sending goes on. Seen within one peek delay. See resumequeue."
    change = staticmethod(control.pause)
    done, already = "paused", "was paused already"

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("queue", nargs="+", help="Queues by label or table.")

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            queues = [registry.queues.find(name) for name in options["queue"]]
        except QueueNotFound as error:
            raise CommandError(str(error)) from error
        for queue in queues:
            changed = type(self).change(queue)
            self.stdout.write(f"{queue._meta.label} {self.done if changed else self.already}.")
