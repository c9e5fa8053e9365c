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

from ...processes.child_databases import require_shareable_databases
from ...processes.supervisor import REFUSED, UNROUTABLE, Supervisor
from .. import subscription_options
from ..startup import bind, check_connections, report_database

HELP = """Receive queues and run their consumers until stopped.

Without arguments it receives every queue that has a consumer. Name a queue by its label
(shop.Mails) or its table (shop_mails). The command supervises --processes worker processes
and one that dispatches delayed messages and runs maintenance. It replaces a process that
dies; the messages that the process was handling are counted and redelivered, or kept as
poison.

On SIGTERM or Ctrl-C running handlers have QUEUEAPP["SHUTDOWN_GRACE"] to end. A second
signal interrupts them.
"""


def _require_stores(queues: list[Any]) -> None:
    """Raise NotMigrated for a database that stores delayed messages for these queues and has no table for it. A
    database that is away does not prevent the start: the dispatcher waits for it, and the queues can be received
    meanwhile."""
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
        parser.add_argument("queue", nargs="*", help="Queues to receive (default: all with a consumer).")
        parser.add_argument("--processes", type=int, default=1, metavar="N", help="Worker processes (default 1).")
        parser.add_argument(
            "--concurrency", type=int, metavar="N",
            help="Receiver threads per queue and process (default: the option of the queue, or "
                 "QUEUEAPP['CONCURRENCY']).",
        )  # fmt: skip
        parser.add_argument(
            "--backlog", action="append", default=[], metavar="[QUEUE=]N",
            help="At most N messages of the queue, or of each queue, are in flight in a process. The limit of the "
                 "queue applies as "
            "well. 0: no message. Repeatable.",
        )  # fmt: skip
        parser.add_argument(
            "--filter", action="append", default=[], metavar="QUEUE=EXPRESSION",
            help="Only receive messages of the queue for which the expression is true. Repeatable.",
        )  # fmt: skip
        parser.add_argument(
            "--consumer", action="append", default=[], metavar="NAME",
            help="Only run this consumer. Repeatable.",
        )  # fmt: skip
        parser.add_argument(
            "--no-dispatcher", action="store_true", help="Do not dispatch delayed messages in this process tree."
        )
        parser.add_argument(
            "--no-maintenance", action="store_true",
            help="Do not run maintenance in this process tree (purging expired messages, releasing leases of dead "
                 "workers).",
        )  # fmt: skip
        parser.add_argument(
            "--http", metavar="[HOST:]PORT",
            help="Serve /healthz, /readyz and /metrics of the process tree at this address (default host: 127.0.0.1; "
                 "port 0: any "
            "free port).",
        )  # fmt: skip
        parser.add_argument(
            "--until-empty", action="store_true",
            help="Exit when the queues are drained and no delayed message for them is left (for jobs and tests). Exit "
                 "code "
            f"{UNROUTABLE}: the remaining messages have no consumer in this project; {REFUSED}: the database user "
            "lacks "
            "privileges.",
        )  # fmt: skip

    def handle(self, *args: Any, **options: Any) -> None:
        # A queue that is named twice, by label and by table, is received once.
        named = list(dict.fromkeys(registry.queues.find(name) for name in options["queue"]))
        only_consumers = subscription_options.read_consumers(options["consumer"], named)
        queues = named or [
            queue
            for queue in registered.queues()
            if not only_consumers or subscription_options.has_one_of(queue, only_consumers)
        ]
        if not queues:
            raise CommandError(
                "No queue has a consumer: write one with @consumer in the module consumers.py of an installed app."
            )
        for queue in queues:
            if not registered.of(queue):
                raise CommandError(f"{queue._meta.label} has no consumer in this project, so it cannot be received.")
        for name, low, high in (("processes", 1, 256), ("concurrency", 1, MAX_CONCURRENCY)):
            value = options[name]
            if value is not None and not low <= value <= high:
                raise CommandError(f"--{name} {value} is not accepted: it must be from {low} to {high}.")
        backlogs, filters = (
            subscription_options.read_backlogs(options["backlog"], queues),
            subscription_options.read_filters(options["filter"], queues),
        )
        if options["until_empty"] and (filters or only_consumers or 0 in backlogs.values()):
            raise CommandError(
                "--until-empty cannot be combined with --filter, --consumer or --backlog 0: it would wait for ever for "
                "the "
                "messages that these leave in the queues."
            )
        for alias in {router.db_for_write(queue) for queue in queues}:
            if options["until_empty"] and not delayed.can_count(alias):
                raise CommandError(
                    f"--until-empty cannot count delayed messages. {MissingVerb(delayed.store_of(alias), 'count')}"
                )
        require_shareable_databases()
        by_alias: dict[str, list[Any]] = {}
        for queue in queues:
            by_alias.setdefault(router.db_for_write(queue), []).append(queue)
        for alias, own in by_alias.items():
            backend_of(connections[alias]).check_server(connections[alias])
            # The owner of a foreign table may create it later: its pump tries again until the table exists.
            managed = [queue for queue in own if queue._meta.managed]
            schema_check.require_tables(alias, managed)
            self._require_rights(alias, managed)
            check_connections(
                self, alias, own, processes=options["processes"], concurrency=options["concurrency"],
                dispatcher=not options["no_dispatcher"], maintenance=not options["no_maintenance"],
            )  # fmt: skip
        if not options["no_dispatcher"]:
            _require_stores(queues)
        self.check_migrations()  # only a notice: the required tables exist
        for alias, own in by_alias.items():
            report_database(self, alias, [*own, DelayedMessage])
        connections.close_all()
        endpoint = bind(options["http"])
        supervisor = Supervisor(
            queues,
            processes=options["processes"],
            concurrency=options["concurrency"],
            dispatcher=not options["no_dispatcher"],
            maintenance=not options["no_maintenance"],
            until_empty=options["until_empty"],
            backlogs=backlogs,
            filters=filters,
            only_consumers=only_consumers,
            endpoint=endpoint,
        )
        probes = f" (probes and metrics: {endpoint.address})" if endpoint is not None else ""
        self.stdout.write(f"Receiving {', '.join(queue._meta.label for queue in queues)}{probes}. Ctrl-C stops.")
        self.stdout.flush()
        with inline.disabled_in_worker():
            code = supervisor.run()
        if code == REFUSED:
            raise CommandError(
                f"The remaining messages cannot be received: {supervisor.remaining.words}", returncode=code
            )
        if code == UNROUTABLE:
            raise CommandError(
                f"The remaining messages have no consumer here: {supervisor.remaining.words}.", returncode=code
            )
        if code:
            raise CommandError(
                "A worker process did not stop cleanly. Its messages were released, unless the log says otherwise.",
                returncode=code,
            )

    def _require_rights(self, alias: str, queues: list[Any]) -> None:
        """Raise CommandError where the database user may not receive; warn about other missing privileges."""
        lacks = privileges.missing_privileges(alias, queues)
        if any(lack.required for lack in lacks):
            raise CommandError(f"The queues cannot be received: {privileges.describe(lacks)}", returncode=REFUSED)
        for lack in lacks:
            self.stderr.write(f"Warning: {privileges.describe([lack])}")
