"""``manage.py healthcheck``: whether the workers of this host are well, for containers and for whoever deploys."""

from __future__ import annotations

import socket
from argparse import ArgumentParser
from datetime import timedelta
from typing import Any

from django.core.management.base import CommandError

from ... import registry
from ...messages.escaping import in_one_line
from ...operations.health import Bounds, health
from ..base_command import OperatorCommand

#: Exit codes.
UNWELL, UNREACHABLE = 1, 3
#: Characters of a line.
TEXT = 1000


class Command(OperatorCommand):
    """Say whether workers are well."""

    help = (
        "Whether the workers of this host are well: each has a heartbeat, no circuit breaker is open and, where a bound is "
        f"given, queues are within it. Exit code 0: well. {UNWELL}: not, a line says why. {UNREACHABLE}: the database cannot be asked."
    )
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "queue", nargs="*", help="Queues that must have a worker; default: those that workers here receive."
        )
        where = parser.add_mutually_exclusive_group()
        where.add_argument("--host", help="Workers of this host (default: the one that it runs on).")
        where.add_argument("--anywhere", action="store_true", help="Workers of any host.")
        parser.add_argument(
            "--max-heartbeat", type=float, metavar="SECONDS", help="Oldest heartbeat (default QUEUEAPP['DEAD_AFTER'])."
        )
        parser.add_argument("--max-age", type=float, metavar="SECONDS", help="Age of the oldest waiting message.")
        parser.add_argument("--max-waiting", type=int, metavar="N", help="Messages that wait in a queue.")
        parser.add_argument("--json", action="store_true", help="Machine-readable output.")

    def handle(self, *args: Any, **options: Any) -> None:
        for name, least in (("max_heartbeat", 0.1), ("max_age", 0), ("max_waiting", 0)):
            value = options[name]
            if value is not None and not least <= value <= 10**9:
                option = name.replace("_", "-")
                raise CommandError(
                    f"--{option} {value} is not accepted: it must be from {least} to 1000000000.", returncode=2
                )
        queues = list(dict.fromkeys(registry.queues.find(name) for name in options["queue"])) or None
        bounds = Bounds(_span(options["max_heartbeat"]), _span(options["max_age"]), options["max_waiting"])
        host = None if options["anywhere"] else options["host"] or socket.gethostname()[:255]
        found = health(queues, host=host, bounds=bounds)
        if options["json"]:
            self.write_json(found.as_dict())
        elif found.healthy:
            self.stdout.write(f"Well: {found.workers} {'worker' if found.workers == 1 else 'workers'}.")
        if not found.healthy:
            said = "; ".join(in_one_line(one, TEXT) for one in found.unwell)
            raise CommandError(f"Not well: {said}", returncode=UNREACHABLE if found.unreachable else UNWELL)


def _span(seconds: float | None) -> timedelta | None:
    return None if seconds is None else timedelta(seconds=seconds)
