"""``manage.py rundelayeddispatcher``: dispatch delayed messages and run maintenance, without receiving."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import CommandError
from django.db import DEFAULT_DB_ALIAS, connections

from queueapp.management.base_command import OperatorCommand
from queueapp.models import DelayedMessage
from queueapp.operations import schema_check
from queueapp.sql import backend_of

from ...processes.child import require_shareable_databases
from ...processes.supervisor import Supervisor
from ..startup import bind, check_services_pool, report_database


class Command(OperatorCommand):
    """Run the delayed dispatcher and maintenance without workers."""

    help = (
        "Dispatch delayed messages to their queues when they are due, and run maintenance (purging expired messages, "
        "releasing leases of dead workers), until stopped. One process per database does each at a time; further ones "
        "stand by. runqueueworker does the same unless it has --no-dispatcher or --no-maintenance."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--database", default=DEFAULT_DB_ALIAS, help="The database (default: 'default').")
        parser.add_argument("--no-maintenance", action="store_true", help="Do not run maintenance in this process.")

        parser.add_argument(
            "--http",
            metavar="[HOST:]PORT",
            help="Serve /healthz, /readyz and /metrics at this address (default host: 127.0.0.1; port 0: any free "
            "port).",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        alias = options["database"]
        backend_of(connections[alias]).check_server(connections[alias])
        require_shareable_databases()
        schema_check.require_tables(alias, [])
        check_services_pool(self, alias, maintenance=not options["no_maintenance"])
        report_database(self, alias, [DelayedMessage])
        connections.close_all()
        endpoint = bind(options["http"])
        supervisor = Supervisor([], maintenance=not options["no_maintenance"], endpoint=endpoint)
        supervisor.children[0].options.aliases = [alias]
        probes = f" (probes and metrics: {endpoint.address})" if endpoint is not None else ""
        self.stdout.write(f"Dispatching delayed messages of {alias!r}{probes}. Ctrl-C stops.")
        self.stdout.flush()
        code = supervisor.run()
        if code:
            raise CommandError("The dispatcher did not stop cleanly.", returncode=code)
