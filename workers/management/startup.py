"""The start of both worker commands: the HTTP server of ``--http``, and the report about the database."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from queueapp.operations import schema_check

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
    for model in models:
        for finding in schema_check.inspect(model, alias):
            command.stderr.write(f"Warning: {finding.problem}. Remedy: {finding.remedy}")
