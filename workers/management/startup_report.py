"""What a command says at its start of the database that it is about to work on: what tables lack, how it is set."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django.core.management.base import BaseCommand

from queueapp.operations import schema_check


def say_what_is_found(command: BaseCommand, alias: str, models: Iterable[Any]) -> None:
    """Settings of the database on stdout, what its tables lack on stderr with the statement that mends it."""
    for remark in schema_check.remarks(alias):
        command.stdout.write(f"Database {alias}: {remark.text}." + (f" {remark.advice}" if remark.advice else ""))
    for model in models:
        for finding in schema_check.inspect(model, alias):
            command.stderr.write(f"Warning: {finding.problem}. To mend it: {finding.remedy}")
