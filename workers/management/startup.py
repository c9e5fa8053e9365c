"""The start of both worker commands: the HTTP server of ``--http``, the report about the database, and the connections
that it allows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from queueapp.operations import connection_limits, schema_check

from ..processes.http import Endpoint, parse_address


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
    for finding in schema_check.inspect(models, alias):
        command.stderr.write(f"Warning: {finding.problem}. Remedy: {finding.remedy}")


def check_connections(
    command: BaseCommand, alias: str, queues: Sequence[Any], *, concurrency: int | None, **tree: Any
) -> None:
    """Compare what this tree of processes needs with the connection pool of a database, and with what the server, the
    database and its user allow (docs/howto/deployment.md). ``tree``: further arguments of
    ``connection_limits.of_tree``. Raises CommandError for a pool with which a process could never handle a message."""
    pool = connection_limits.pool_shortfall(alias, queues, concurrency)
    if pool is not None and pool.fatal:
        raise CommandError(f"No message could be handled: {pool.problem}. Remedy: {pool.remedy}.")
    given = {name: tree[name] for name in ("dispatcher", "maintenance") if name in tree}
    check_services_pool(command, alias, **given)
    needed = connection_limits.of_tree(queues, concurrency=concurrency, **tree)
    for found in [*([pool] if pool else []), *connection_limits.server_shortfalls(alias, needed, free=True)]:
        command.stderr.write(f"Warning: {found.problem}. Remedy: {found.remedy}.")


def check_services_pool(command: BaseCommand, alias: str, **services: bool) -> None:
    """Compare the connection pool of a database with what the process needs that dispatches and runs maintenance
    (``connection_limits.services_shortfall``)."""
    found = connection_limits.services_shortfall(alias, **services)
    if found is not None:
        command.stderr.write(f"Warning: {found.problem}. Remedy: {found.remedy}.")
