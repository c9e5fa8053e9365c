"""``manage.py runqueueworker``: receive queues until stopped."""

from __future__ import annotations

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from typing import Any

from django.core.management.base import CommandError
from django.db import Error, connections, router

from queueapp import delayed, inline, registry
from queueapp.conf import MAX_CONCURRENCY
from queueapp.consuming.registry import registered
from queueapp.errors import MissingVerb, QueueNotFound
from queueapp.flow.filters import SubscriberFilter
from queueapp.management.base_command import OperatorCommand, counted
from queueapp.messages.escaping import in_one_line
from queueapp.models import DelayedMessage
from queueapp.models.delivery.options import MOST_OUTSTANDING
from queueapp.operations import connection_limits, privileges, schema_check
from queueapp.sql import ErrorKind, backend_of

from ...processes.child import require_shareable_databases
from ...processes.http import Endpoint
from ...processes.supervisor import REFUSED, UNROUTABLE, Supervisor
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
            "--no-dispatcher", action="store_true",
            help="Neither dispatch delayed messages nor run schedules in this process tree: another one has to.",
        )  # fmt: skip
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
        only_consumers = read_consumers(options["consumer"], named)
        queues = named or [
            queue for queue in registered.queues() if not only_consumers or has_one_of(queue, only_consumers)
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
            read_backlogs(options["backlog"], queues),
            read_filters(options["filter"], queues),
        )
        if options["until_empty"] and (filters or only_consumers or 0 in backlogs.values()):
            raise CommandError(
                "--until-empty cannot be combined with --filter, --consumer or --backlog 0: it would wait for ever for "
                "the messages that these leave in the queues."
            )
        for alias in {router.db_for_write(queue) for queue in queues}:
            if options["until_empty"] and not delayed.can_count(alias):
                raise CommandError(
                    f"--until-empty cannot count delayed messages. {MissingVerb(delayed.store_of(alias), 'count')}"
                )
        self._check_databases(queues, options)
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
        self.stdout.write(_start_line(queues, endpoint, options))
        self.stdout.flush()
        with inline.disabled_in_worker():
            self._explain(supervisor.run(), supervisor)

    @staticmethod
    def _explain(code: int, supervisor: Supervisor) -> None:
        """Raise CommandError with the exit code of the tree, unless all is well."""
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

    def _check_databases(self, queues: list[Any], options: dict[str, Any]) -> None:
        """Raise where a database lacks what the workers need: a supported server, tables, privileges, connections."""
        require_shareable_databases()
        by_alias: dict[str, list[Any]] = {}
        for queue in queues:
            by_alias.setdefault(router.db_for_write(queue), []).append(queue)
        for alias, alias_queues in by_alias.items():
            backend_of(connections[alias]).check_server(connections[alias])
            # The owner of a foreign table may create it later: its pump tries again until the table exists.
            managed = [queue for queue in alias_queues if queue._meta.managed]
            schema_check.require_tables(alias, managed)
            self._require_rights(alias, managed)
            check_connections(
                self, alias, alias_queues, processes=options["processes"], concurrency=options["concurrency"],
                dispatcher=not options["no_dispatcher"], maintenance=not options["no_maintenance"],
            )  # fmt: skip
        if not options["no_dispatcher"]:
            _require_stores(queues)
        self.check_migrations()  # only a notice: the required tables exist
        for alias, alias_queues in by_alias.items():
            report_database(self, alias, [*alias_queues, DelayedMessage])
        connections.close_all()

    def _require_rights(self, alias: str, queues: list[Any]) -> None:
        """Raise CommandError where the database user may not receive; warn about other missing privileges."""
        lacks = privileges.missing_privileges(alias, queues)
        if any(lack.required for lack in lacks):
            raise CommandError(f"The queues cannot be received: {privileges.describe(lacks)}", returncode=REFUSED)
        for lack in lacks:
            self.stderr.write(f"Warning: {privileges.describe([lack])}")


def _start_line(queues: Sequence[Any], endpoint: Endpoint | None, options: dict[str, Any]) -> str:
    """What this tree of processes runs."""
    threads = {queue._meta.label: connection_limits.receivers_of(queue, options["concurrency"]) for queue in queues}
    if len(threads) > 1 and len(set(threads.values())) == 1:
        listed = f"{', '.join(threads)} ({counted(next(iter(threads.values())), 'thread')} each)"
    else:
        listed = ", ".join(f"{label} ({counted(count, 'thread')})" for label, count in threads.items())
    services = [name for name in ("dispatcher", "maintenance") if not options[f"no_{name}"]]
    pools = {
        alias: size
        for alias in sorted({router.db_for_write(queue) for queue in queues})
        if (size := connection_limits.pool_size(alias)) is not None
    }
    parts = [
        f"Receiving {listed} in {counted(options['processes'], 'process', 'processes')}",
        *([f"with {' and '.join(services)}"] if services else []),
        *(f"connection pool of {alias!r}: {size}" for alias, size in pools.items()),
        *([f"probes and metrics: {endpoint.address}"] if endpoint is not None else []),
    ]
    return f"{', '.join(parts)}. Ctrl-C stops."


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


# -- the options of a subscription: ``--backlog`` and ``--filter``, by queue, and ``--consumer`` -----------------------


def read_backlogs(given: Sequence[str], queues: Sequence[Any]) -> dict[str, int]:
    """Limits by the label of a queue; a limit for a queue takes precedence over one for all. Raises CommandError."""
    for_all: dict[str, int] = {}
    for_queue: dict[str, int] = {}
    for text in given:
        name, _, number = text.rpartition("=")
        # Longer numbers exceed the limit, and int() refuses the longest.
        count = int(number) if number.isascii() and number.isdecimal() and len(number) < 10 else -1
        if not 0 <= count <= MOST_OUTSTANDING:
            raise CommandError(
                f"--backlog {in_one_line(text, 80)!r} is not accepted: it must be N or QUEUE=N, N a whole number from "
                f"0 to {MOST_OUTSTANDING}."
            )
        if name:
            for_queue[_label("--backlog", name, queues)] = count
        else:
            for_all = {queue._meta.label: count for queue in queues}
    return for_all | for_queue


def read_filters(given: Sequence[str], queues: Sequence[Any]) -> dict[str, str]:
    """Expressions by the label of a queue. Raises CommandError, which shows the position of an error in the
    expression."""
    filters: dict[str, str] = {}
    for text in given:
        name, _, expression = text.partition("=")
        if not name or not expression.strip():
            raise CommandError(f"--filter {in_one_line(text, 80)!r} is not accepted: it must be QUEUE=EXPRESSION.")
        label = _label("--filter", name, queues)
        if label in filters:
            raise CommandError(f"--filter names {label} twice: write one expression with AND.")
        try:
            SubscriberFilter(expression, label)
        except (ValueError, ImportError) as error:
            raise CommandError(f"--filter of {label}: {error}") from error
        filters[label] = expression
    return filters


def read_consumers(given: Sequence[str], queues: Sequence[Any]) -> list[str]:
    """The names of the consumers to run. Raises CommandError for a name that no received queue has."""
    for name in given:
        if not any(has_one_of(queue, [name]) for queue in queues or registered.queues()):
            known = sorted(entry.name for queue in queues or registered.queues() for entry in registered.of(queue))
            raise CommandError(
                f"--consumer {in_one_line(name, 200)!r} is not accepted: the consumers of these queues are "
                f"{', '.join(known) or 'none'}."
            )
    return list(dict.fromkeys(given))


def has_one_of(queue: Any, names: Sequence[str]) -> bool:
    """Whether a queue has one of these consumers."""
    return any(consumer.name in names for consumer in registered.of(queue))


def _label(option: str, name: str, queues: Sequence[Any]) -> str:
    try:
        queue = registry.queues.find(name)
    except QueueNotFound as error:
        raise CommandError(f"{option}: {error}") from error
    if queue not in queues:
        raise CommandError(f"{option} names {queue._meta.label}, which is not received here.")
    label: str = queue._meta.label
    return label
