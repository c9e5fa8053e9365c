"""``manage.py rundelayeddispatcher``: dispatch delayed messages and keep house, without receiving anything."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import CommandError
from django.db import DEFAULT_DB_ALIAS, connections

from queueapp.management.base_command import OperatorCommand
from queueapp.models import DelayedMessage
from queueapp.operations import schema_check
from queueapp.sql import backend_of

from ...processes.child_databases import refuse_where_children_would_see_another_database
from ...processes.supervisor import Supervisor
from ..http_option import bind
from ..startup_report import say_what_is_found


class Command(OperatorCommand):
    """Run the delayed dispatcher and the housekeeping without workers."""

    help = (
        "Move delayed messages to their queues when they are due, until stopped. One process per database does it at a "
        "time; further ones stand by. Likewise keep house: delete what has expired, give back what dead workers had leased. "
        "runqueueworker does the same unless it is told --no-dispatcher or --no-housekeeping."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--database", default=DEFAULT_DB_ALIAS, help="Which database (default: 'default').")
        parser.add_argument("--no-housekeeping", action="store_true", help="Do not keep house here, only dispatch.")

        parser.add_argument(
            "--http",
            metavar="[HOST:]PORT",
            help="Answer /healthz, /readyz and /metrics there (default host: 127.0.0.1).",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        alias = options["database"]
        backend_of(connections[alias]).check_server(connections[alias])
        refuse_where_children_would_see_another_database()
        schema_check.require_tables(alias, [])
        say_what_is_found(self, alias, [DelayedMessage])
        connections.close_all()
        supervisor = Supervisor([], housekeeping=not options["no_housekeeping"], endpoint=bind(options["http"]))
        supervisor.children[0].options.aliases = [alias]
        self.stdout.write(f"Dispatching delayed messages of {options['database']!r}. Ctrl-C stops.")
        self.stdout.flush()
        code = supervisor.run()
        if code:
            raise CommandError("The dispatcher did not stop cleanly.", returncode=code)
