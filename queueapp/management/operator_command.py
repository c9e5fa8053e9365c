"""The base of the commands: what an operator can mend is one line and an exit code, never a traceback.

``--traceback`` shows where it was raised.
"""

from __future__ import annotations

import sys
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from ..operating.explaining import explain


class OperatorCommand(BaseCommand):
    """A command that translates what ``operating.explaining`` knows into CommandError."""

    def execute(self, *args: Any, **options: Any) -> Any:
        try:
            return super().execute(*args, **options)
        except CommandError:
            raise
        except Exception as error:
            line = explain(error)
            if line is None:
                raise
            raise CommandError(line) from error

    def confirm(self, question: str, answer: str, instead: str) -> None:
        """Ask a question that one answer says yes to. Raises CommandError for another one, and where nobody can answer:
        ``instead`` is the option that says yes beforehand."""
        if not sys.stdin.isatty():
            raise CommandError(f"There is no terminal to ask at: say {instead} if it is meant. Nothing was done.")
        if input(question).strip() != answer:
            raise CommandError("Nothing was done.")
