"""``manage.py rundelayeddispatcher``: dispatch delayed messages without receiving anything."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand
from django.db import DEFAULT_DB_ALIAS

from ...processes.supervisor import Supervisor


class Command(BaseCommand):
    """Run the delayed dispatcher alone."""

    help = (
        "Move delayed messages to their queues when they are due, until stopped. One process per database does it at a "
        "time; further ones stand by. runqueueworker does the same unless it is told --no-dispatcher."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--database", default=DEFAULT_DB_ALIAS, help="Which database (default: 'default').")

    def handle(self, *args: Any, **options: Any) -> None:
        supervisor = Supervisor([], dispatcher=True)
        supervisor.children[0].options.aliases = [options["database"]]
        self.stdout.write(f"Dispatching delayed messages of {options['database']!r}. Ctrl-C stops.")
        self.stdout.flush()
        supervisor.run()
