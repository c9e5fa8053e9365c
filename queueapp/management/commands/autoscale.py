"""``manage.py autoscale``: how many workers queues want, as JSON, or as SQL for whoever asks the database itself."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from datetime import timedelta
from typing import Any

from django.core.management.base import CommandError

from ... import registry
from ...operations.autoscale import Rule, scales, text_for
from ..base_command import OperatorCommand


class Command(OperatorCommand):
    """Show how many workers queues want."""

    help = (
        "How many worker processes each queue wants, as a list of JSON objects: its backlog divided by --per-worker, and more than "
        "there are while its oldest message is older than --late. --sql prints a SELECT for KEDA instead. Exit code 1: not "
        "everything is known, and what is not is null."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("queue", nargs="*", help="Queues by label or table; default: all.")
        parser.add_argument(
            "--per-worker", type=int, default=1000, metavar="N", help="Messages that one worker is for (default 1000)."
        )
        parser.add_argument(
            "--late", type=float, metavar="SECONDS", help="Age of the oldest message above which there are to be more."
        )
        parser.add_argument("--min", type=int, default=0, metavar="N", help="Workers at least (default 0).")
        parser.add_argument("--max", type=int, default=10, metavar="N", help="Workers at most (default 10).")
        parser.add_argument("--sql", action="store_true", help="Print the statement for one queue instead.")

    def handle(self, *args: Any, **options: Any) -> None:
        late = options["late"]
        if late is not None and not 1 <= late <= 31_536_000:
            raise CommandError(f"--late {late} is not accepted: it must be from 1 to 31536000 seconds.")
        rule = Rule(
            options["per_worker"], None if late is None else timedelta(seconds=late), options["min"], options["max"]
        )
        queues = list(dict.fromkeys(registry.queues.find(name) for name in options["queue"])) or list(registry.queues)
        if options["sql"]:
            if len(options["queue"]) != 1:
                raise CommandError("--sql is for one queue: name it.")
            self.stdout.write(text_for(queues[0], rule))
            return
        found = scales(queues, rule)
        self.stdout.write(json.dumps([one.as_dict() for one in found], indent=2))
        if unknown := [one.queue for one in found if one.wanted is None]:
            raise CommandError(f"Not known: {', '.join(unknown)}.")
