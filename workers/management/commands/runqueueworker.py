"""``manage.py runqueueworker``: receive queues until stopped."""

from __future__ import annotations

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from typing import Any

from django.core.management.base import CommandError
from django.db import connections, router

from queueapp import delayed, registry
from queueapp.conf import MAX_CONCURRENCY
from queueapp.consuming.registry import registered
from queueapp.errors import MissingVerb
from queueapp.management.operator_command import OperatorCommand
from queueapp.models import DelayedMessage
from queueapp.operating import inspection
from queueapp.sql import backend_of

from ...processes.same_databases import refuse_where_children_would_see_another_database
from ...processes.supervisor import NOT_FOR_US, Supervisor
from ..findings import say_what_is_found

HELP = """Receive queues and run their consumers until stopped.

Without arguments every queue that has a consumer is received. A queue is named by its
label (flights.FlightDelays) or its table (flight_delays). The command supervises
--processes worker processes and one that dispatches delayed messages and keeps house; a
process that dies is replaced, and what it was handling is counted, redelivered or kept
as poison.

SIGTERM or Ctrl-C: running handlers get QUEUEAPP["SHUTDOWN_GRACE"] to end. A second one
interrupts them.
"""


class Command(OperatorCommand):
    """Run workers."""

    help = HELP

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> Any:
        return super().create_parser(prog_name, subcommand, formatter_class=RawDescriptionHelpFormatter, **kwargs)

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("queue", nargs="*", help="Queues to receive; default: all that have a consumer.")
        parser.add_argument("--processes", type=int, default=1, metavar="N", help="Worker processes (default 1).")
        parser.add_argument(
            "--concurrency", type=int, metavar="N",
            help="Receive tasks (threads) per queue and process; default: the queue's, or QUEUEAPP['CONCURRENCY'].",
        )  # fmt: skip
        parser.add_argument("--no-dispatcher", action="store_true", help="Do not dispatch delayed messages here.")
        parser.add_argument(
            "--no-housekeeping", action="store_true",
            help="Do not keep house here: delete what has expired, give back what dead workers had leased.",
        )  # fmt: skip
        parser.add_argument(
            "--until-empty", action="store_true",
            help="End when the queues, and the delayed messages for them, are empty (for jobs and tests). Says what it waits "
            f"for; exit code {NOT_FOR_US} when no consumer here takes what is left.",
        )  # fmt: skip

    def handle(self, *args: Any, **options: Any) -> None:
        # One that is named twice, by label and by table, has its tasks once.
        named = list(dict.fromkeys(registry.queues.find(name) for name in options["queue"]))
        queues = named or registered.queues()
        if not queues:
            raise CommandError(
                "No queue has a consumer: write one with @consumer in a module consumers.py of an installed app."
            )
        for queue in queues:
            if not registered.of(queue):
                raise CommandError(
                    f"{queue._meta.label} has no consumer in this project, so nothing could be received."
                )
        for name, low, high in (("processes", 1, 256), ("concurrency", 1, MAX_CONCURRENCY)):
            value = options[name]
            if value is not None and not low <= value <= high:
                raise CommandError(f"--{name} {value} is not accepted: it must be from {low} to {high}.")
        for alias in {router.db_for_write(queue) for queue in queues}:
            if options["until_empty"] and not delayed.can_count(alias):
                raise CommandError(
                    f"--until-empty cannot see what is delayed. {MissingVerb(delayed.store_of(alias), 'count')}"
                )
        refuse_where_children_would_see_another_database()
        by_alias: dict[str, list[Any]] = {}
        for queue in queues:
            by_alias.setdefault(router.db_for_write(queue), []).append(queue)
        for alias, own in by_alias.items():
            backend_of(connections[alias]).check_server(connections[alias])
            # A foreign table is made by whoever owns it, perhaps after us: its pump tries again until it is there.
            inspection.require_tables(alias, [queue for queue in own if queue._meta.managed])
        self.check_migrations()  # says so, and no more: what cannot be done without is there
        for alias, own in by_alias.items():
            say_what_is_found(self, alias, [*own, DelayedMessage])
        connections.close_all()
        supervisor = Supervisor(
            queues,
            processes=options["processes"],
            concurrency=options["concurrency"],
            dispatcher=not options["no_dispatcher"],
            housekeeping=not options["no_housekeeping"],
            until_empty=options["until_empty"],
        )
        self.stdout.write(f"Receiving {', '.join(queue._meta.label for queue in queues)}. Ctrl-C stops.")
        self.stdout.flush()
        code = supervisor.run()
        if code == NOT_FOR_US:
            raise CommandError(f"What is left nobody here can handle: {supervisor.left}.", returncode=code)
        if code:
            raise CommandError("A worker process did not stop cleanly; what it held was given back.", returncode=code)
