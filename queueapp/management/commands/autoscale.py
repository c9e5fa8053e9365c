"""``manage.py autoscale``: the desired number of workers of queues as JSON, or as SQL for autoscalers that query the
database."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from datetime import timedelta
from typing import Any

from django.core.management.base import CommandError

from ... import registry
from ...operations.autoscale import ScalingRule, desired_workers, desired_workers_for, statement_for
from ...operations.statistics import backlogs, stats_by_name
from ..base_command import OperatorCommand


class Command(OperatorCommand):
    """Show the desired number of workers."""

    help = (
        "Print the desired number of worker processes of each queue as a list of JSON objects: its backlog divided by "
        "--per-worker, and more than there are while its oldest message is older than --late. --sql prints a SELECT "
        "for KEDA instead. Exit code 1: some values are unknown (null)."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "queue", nargs="*", help="Queues by label, by table or as in queuestats (celery:mail); default: all."
        )
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
        names = options["queue"]
        if options["sql"]:
            if len(names) != 1:
                raise CommandError("--sql needs exactly one queue.")
            self.stdout.write(statement_for(registry.queues.find(names[0]), rule))
            return
        if names:
            found = [desired_workers_for(stats, rule) for stats in stats_by_name(names, backlogs)]
        else:
            found = desired_workers(registry.queues, rule)
        self.stdout.write(json.dumps([scale.as_dict() for scale in found], indent=2))
        if unknown := [scale.queue for scale in found if scale.desired is None]:
            raise CommandError(f"Unknown: {', '.join(unknown)}.")
