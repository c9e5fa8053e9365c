"""``manage.py healthcheck``: whether the workers of this host are healthy, for containers and deploys."""

from __future__ import annotations

import socket
from argparse import ArgumentParser
from datetime import timedelta
from typing import Any

from django.core.management.base import CommandError

from ... import registry
from ...messages.escaping import in_one_line
from ...operations.health import Bounds, health
from ..base_command import OperatorCommand, counted

#: Exit codes.
UNHEALTHY, UNREACHABLE = 1, 3
#: Characters of a line.
TEXT = 1000


class Command(OperatorCommand):
    """Check whether workers are healthy."""

    help = (
        "Check the workers of this host: each has a recent heartbeat, no circuit breaker is open and, where a bound is "
        f"given, queues are within it. Exit code 0: healthy. {UNHEALTHY}: not; the output says why. {UNREACHABLE}: the "
        "database cannot be read."
    )
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "queue", nargs="*", help="Queues that must have a worker; default: those that workers here receive."
        )
        where = parser.add_mutually_exclusive_group()
        where.add_argument("--host", help="Check the workers of this host (default: the local host).")
        where.add_argument("--anywhere", action="store_true", help="Check the workers of all hosts.")
        parser.add_argument(
            "--max-heartbeat",
            type=float,
            metavar="SECONDS",
            help="Maximum age of a heartbeat (default QUEUEAPP['DEAD_AFTER']).",
        )
        parser.add_argument(
            "--max-age", type=float, metavar="SECONDS", help="Maximum age of the oldest waiting message."
        )
        parser.add_argument(
            "--max-waiting", type=int, metavar="N", help="Maximum number of waiting messages of a queue."
        )
        parser.add_argument("--json", action="store_true", help="Machine-readable output.")

    def handle(self, *args: Any, **options: Any) -> None:
        for name, low in (("max_heartbeat", 0.1), ("max_age", 0), ("max_waiting", 0)):
            value = options[name]
            if value is not None and not low <= value <= 10**9:
                option = name.replace("_", "-")
                raise CommandError(
                    f"--{option} {value} is not accepted: it must be from {low} to 1000000000.", returncode=2
                )
        queues = list(dict.fromkeys(registry.queues.find(name) for name in options["queue"])) or None
        bounds = Bounds(_duration(options["max_heartbeat"]), _duration(options["max_age"]), options["max_waiting"])
        host = None if options["anywhere"] else options["host"] or socket.gethostname()[:255]
        found = health(queues, host=host, bounds=bounds)
        if options["json"]:
            self.write_json(found.as_dict())
        elif found.ok:
            self.stdout.write(f"OK: {counted(found.workers, 'worker')}.")
        if not found.ok:
            problems = "; ".join(in_one_line(problem, TEXT) for problem in found.problems)
            raise CommandError(f"Not healthy: {problems}", returncode=UNREACHABLE if found.unreachable else UNHEALTHY)


def _duration(seconds: float | None) -> timedelta | None:
    return None if seconds is None else timedelta(seconds=seconds)
