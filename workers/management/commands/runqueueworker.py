"""``manage.py runqueueworker``: receive queues until stopped."""

from __future__ import annotations

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from typing import Any

from django.core.management.base import CommandError
from django.db import Error, connections, router

from queueapp import delayed, inline, registry
from queueapp.conf import MAX_CONCURRENCY
from queueapp.consuming.registry import registered
from queueapp.errors import MissingVerb
from queueapp.management.base_command import OperatorCommand
from queueapp.models import DelayedMessage
from queueapp.operations import privileges, schema_check
from queueapp.sql import ErrorKind, backend_of

from ...processes.child_databases import refuse_where_children_would_see_another_database
from ...processes.supervisor import NOT_FOR_US, REFUSED, Supervisor
from .. import subscription_options
from ..http_option import bind
from ..startup_report import say_what_is_found

HELP = """Receive queues and run their consumers until stopped.

Without arguments every queue that has a consumer is received. A queue is named by its
label (flights.FlightDelays) or its table (flight_delays). The command supervises
--processes worker processes and one that dispatches delayed messages and keeps house; a
process that dies is replaced, and what it was handling is counted, redelivered or kept
as poison.

SIGTERM or Ctrl-C: running handlers get QUEUEAPP["SHUTDOWN_GRACE"] to end. A second one
interrupts them.
"""


def _require_stores(queues: list[Any]) -> None:
    """Raise NotMigrated for a database that keeps delayed messages for these queues and has no table for it. One that is away is
    waited for by the dispatcher: the queues can be received meanwhile."""
    elsewhere = {alias for queue in queues for alias in delayed.stores_of(queue)}
    for alias in sorted(elsewhere - {router.db_for_write(queue) for queue in queues}):
        try:
            schema_check.require_tables(alias, [], by_router=True)
        except Error as error:
            if backend_of(connections[alias]).error_kind(error) is not ErrorKind.CONNECTION:
                raise


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
        parser.add_argument(
            "--backlog", action="append", default=[], metavar="[QUEUE=]N",
            help="Each process holds at most N messages of a queue, or of each; the queue's own limit applies as well. 0: none.",
        )  # fmt: skip
        parser.add_argument(
            "--filter", action="append", default=[], metavar="QUEUE=EXPRESSION",
            help="Take no message of a queue of which this is not true; it is left to others.",
        )  # fmt: skip
        parser.add_argument(
            "--consumer", action="append", default=[], metavar="NAME",
            help="Be for this consumer, and no other of its queue, whose messages are left to other workers. May be repeated.",
        )  # fmt: skip
        parser.add_argument("--no-dispatcher", action="store_true", help="Do not dispatch delayed messages here.")
        parser.add_argument(
            "--no-housekeeping", action="store_true",
            help="Do not keep house here: delete what has expired, give back what dead workers had leased.",
        )  # fmt: skip
        parser.add_argument(
            "--http", metavar="[HOST:]PORT",
            help="Answer /healthz, /readyz and /metrics there, for all processes together (default host: 127.0.0.1; 0: a free port).",
        )  # fmt: skip
        parser.add_argument(
            "--until-empty", action="store_true",
            help="End when the queues, and the delayed messages for them, are empty (for jobs and tests). Says what it waits "
            f"for; exit code {NOT_FOR_US} when no consumer here takes what is left, {REFUSED} when the database user may not.",
        )  # fmt: skip

    def handle(self, *args: Any, **options: Any) -> None:
        # One that is named twice, by label and by table, has its tasks once.
        named = list(dict.fromkeys(registry.queues.find(name) for name in options["queue"]))
        lane = subscription_options.read_consumers(options["consumer"], named)
        queues = named or [
            queue for queue in registered.queues() if not lane or subscription_options.has_one_of(queue, lane)
        ]
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
        backlogs, filters = (
            subscription_options.read_backlogs(options["backlog"], queues),
            subscription_options.read_filters(options["filter"], queues),
        )
        if options["until_empty"] and (filters or lane or 0 in backlogs.values()):
            raise CommandError(
                "--until-empty would wait for ever for what --filter, --consumer, or a --backlog of 0, leaves to others."
            )
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
            managed = [queue for queue in own if queue._meta.managed]
            schema_check.require_tables(alias, managed)
            self._require_rights(alias, managed)
        if not options["no_dispatcher"]:
            _require_stores(queues)
        self.check_migrations()  # says so, and no more: what cannot be done without is there
        for alias, own in by_alias.items():
            say_what_is_found(self, alias, [*own, DelayedMessage])
        connections.close_all()
        endpoint = bind(options["http"])
        supervisor = Supervisor(
            queues,
            processes=options["processes"],
            concurrency=options["concurrency"],
            dispatcher=not options["no_dispatcher"],
            housekeeping=not options["no_housekeeping"],
            until_empty=options["until_empty"],
            backlogs=backlogs,
            filters=filters,
            lane=lane,
            endpoint=endpoint,
        )
        if endpoint is not None:
            self.stdout.write(f"Probes and metrics: {endpoint.address}")
        self.stdout.write(f"Receiving {', '.join(queue._meta.label for queue in queues)}. Ctrl-C stops.")
        self.stdout.flush()
        with inline.disabled_in_worker():
            code = supervisor.run()
        if code == REFUSED:
            raise CommandError(f"What is left cannot be received: {supervisor.left}", returncode=code)
        if code == NOT_FOR_US:
            raise CommandError(f"What is left nobody here can handle: {supervisor.left}.", returncode=code)
        if code:
            raise CommandError(
                "A worker process did not stop cleanly; what it held was given back, unless the log says otherwise.",
                returncode=code,
            )

    def _require_rights(self, alias: str, queues: list[Any]) -> None:
        """End where the database user may not receive; say what else it may not, which is met later."""
        lacks = privileges.missing_privileges(alias, queues)
        if any(lack.needed for lack in lacks):
            raise CommandError(f"Nothing can be received: {privileges.in_words(lacks)}", returncode=REFUSED)
        for lack in lacks:
            self.stderr.write(f"Warning: {privileges.in_words([lack])}")
