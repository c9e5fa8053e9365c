"""``manage.py autoscale``: the desired number of workers of queues as JSON, or as SQL for autoscalers that query the
database."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from datetime import timedelta
from typing import Any

from django.core.management.base import CommandError

from ... import registry
from ...operations.autoscale import ScalingRule, desired_workers, statement_for
from ..base_command import OperatorCommand


class Command(OperatorCommand):
    """Show the desired number of workers."""

    help = (
        "Print the desired number of worker processes of each queue as a list of JSON objects: its backlog divided by "
        "--per-worker, and "
        "more than there are while its oldest message is older than --late. --sql prints a SELECT for KEDA instead. "
        "Exit code 1: "
        "some values are unknown (null)."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("queue", nargs="*", help="Queues by label or table; default: all.")
        parser.add_argument(
            "--per-worker", type=int, default=1000, metavar="N", help="Messages per worker (default 1000)."
        )
        parser.add_argument(
            "--late", type=float, metavar="SECONDS", help="Age of the oldest message above which workers are added."
        )
        parser.add_argument("--min", type=int, default=0, metavar="N", help="Minimum number of workers (default 0).")
        parser.add_argument("--max", type=int, default=10, metavar="N", help="Maximum number of workers (default 10).")
        parser.add_argument("--sql", action="store_true", help="Print the SELECT for one queue instead.")

    def handle(self, *args: Any, **options: Any) -> None:
        late = options["late"]
        if late is not None and not 1 <= late <= 31_536_000:
            raise CommandError(f"--late {late} is not accepted: it must be from 1 to 31536000 seconds.")
        rule = ScalingRule(
            options["per_worker"], None if late is None else timedelta(seconds=late), options["min"], options["max"]
        )
        queues = list(dict.fromkeys(registry.queues.find(name) for name in options["queue"])) or list(registry.queues)
        if options["sql"]:
            if len(options["queue"]) != 1:
                raise CommandError("--sql needs exactly one queue.")
            self.stdout.write(statement_for(queues[0], rule))
            return
        found = desired_workers(queues, rule)
        self.stdout.write(json.dumps([each.as_dict() for each in found], indent=2))
        if unknown := [each.queue for each in found if each.desired is None]:
            raise CommandError(f"Unknown: {', '.join(unknown)}.")
