"""The start of both worker commands: the HTTP server of ``--http``, the report about the database, and the size of its
pool."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db import connections

from queueapp.conf import settings
from queueapp.models.delivery import Semantics
from queueapp.operations import schema_check

from ..processes.http import Endpoint, parse_address
from ..processes.in_flight_slots import receivers_and_slots


def bind(text: str | None) -> Endpoint | None:
    """Bind the address of ``--http``, before anything else runs. Raises InvalidOption, and CommandError for an address
    that cannot be bound."""
    if text is None:
        return None
    host, port = parse_address(text)
    try:
        return Endpoint(host, port)
    except OSError as error:
        raise CommandError(f"--http {text}: cannot listen on this address: {error.strerror or error}.") from error


def report_database(command: BaseCommand, alias: str, models: Iterable[Any]) -> None:
    """Write remarks about the database to stdout, and what its tables lack to stderr, with the statement that repairs
    it."""
    for remark in schema_check.remarks(alias):
        command.stdout.write(f"Database {alias}: {remark.text}." + (f" {remark.advice}" if remark.advice else ""))
    for model in models:
        for finding in schema_check.inspect(model, alias):
            command.stderr.write(f"Warning: {finding.problem}. Remedy: {finding.remedy}")


def check_pool(command: BaseCommand, alias: str, queues: Sequence[Any], concurrency: int | None) -> None:
    """Compare the connection pool of a database with what a worker process needs (docs/howto/deployment.md). Raises
    CommandError for a pool with which a process could never handle a message."""
    size = _pool_size(connections[alias].settings_dict.get("OPTIONS", {}).get("pool"))
    if size is None:
        return
    receivers = sum(receivers_and_slots(queue, concurrency)[0] for queue in queues)
    leases = any(queue.delivery.semantics is not Semantics.AT_MOST_ONCE for queue in queues)
    services = 1 + leases + bool(settings.NOTIFY)
    needed, minimum = len(queues) + receivers + services, len(queues) + 1 + services
    if size >= needed:
        return
    count = len(queues)
    text = (
        f"the connection pool of database {alias!r} has at most {size} connections (OPTIONS['pool']), and a worker "
        "process needs "
        f"{needed}: {count} for the pump{'s' if count != 1 else ''}, {receivers} for receivers, {services} for services"
    )
    remedy = f"set its max_size to {needed} or more, lower --concurrency, or remove the pool"
    if size < minimum:
        raise CommandError(f"No message could be handled: {text}. At least {minimum} are required: {remedy}.")
    command.stderr.write(f"Warning: {text}. Receivers will wait for each other. Remedy: {remedy}.")


def _pool_size(pool: Any) -> int | None:
    """The largest size of a pool as ``psycopg_pool`` reads its options; None: there is no pool."""
    if not pool:
        return None
    options = pool if isinstance(pool, dict) else {}
    size: int = options.get("max_size") or options.get("min_size", 4)
    return size
