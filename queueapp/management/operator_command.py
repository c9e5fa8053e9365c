"""The base of the commands: what an operator can mend is one line and an exit code, never a traceback.

``--traceback`` shows where it was raised.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from typing import Any

from django.core.management.base import BaseCommand, CommandError, OutputWrapper

from ..operating.explaining import explain

#: Exit codes as a shell has them for whoever is ended by SIGINT, or by SIGPIPE.
INTERRUPTED, NOBODY_READS = 130, 141


class OperatorCommand(BaseCommand):
    """A command that translates what ``operating.explaining`` knows into CommandError."""

    def execute(self, *args: Any, **options: Any) -> Any:
        _refuse_what_is_no_text(options)
        for stream in (sys.stdout, sys.stderr):
            # A locale that lacks a character of a message, or our dash, is no reason not to show the rest.
            if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
                stream.reconfigure(errors="backslashreplace")
        try:
            result = super().execute(*args, **options)
            # Here and not at the end of the interpreter, where nothing can be said of it any more.
            if self.stdout._out is not None:
                self.stdout.flush()
            return result
        except CommandError:
            raise
        except KeyboardInterrupt as error:
            raise CommandError("Stopped by Ctrl-C.", returncode=INTERRUPTED) from error
        except OSError as error:
            if not _was_writing(error) or self.stdout._out is not sys.stdout:
                raise
            _write_nowhere()
            if isinstance(error, BrokenPipeError):
                sys.exit(NOBODY_READS)  # ``| head``: whoever read has seen enough
            raise CommandError(f"The output cannot be written: {error.strerror}.") from error
        except Exception as error:
            line = explain(error)
            if line is None:
                raise
            raise CommandError(line) from error

    def confirm(self, question: str, answer: str, instead: str) -> None:
        """Ask a question that one answer says yes to. Raises CommandError for another one, and where nobody can answer:
        ``instead`` is the option that says yes beforehand."""
        if sys.stdin is None or not sys.stdin.isatty():
            raise CommandError(f"There is no terminal to ask at: say {instead} if it is meant. Nothing was done.")
        try:
            said = input(question).strip()
        except (EOFError, KeyboardInterrupt) as error:
            self.stdout.write("")
            interrupted = isinstance(error, KeyboardInterrupt)
            raise CommandError("Nothing was done.", returncode=INTERRUPTED if interrupted else 1) from error
        if said != answer:
            raise CommandError("Nothing was done.")


def _refuse_what_is_no_text(options: dict[str, Any]) -> None:
    """Raises CommandError for a NUL, and for bytes of the command line that are not in the encoding of the terminal: no
    database takes either."""
    for name, value in options.items():
        for text in value if isinstance(value, list | tuple) else [value]:
            if isinstance(text, str) and ("\0" in text or any("\ud800" <= c <= "\udfff" for c in text)):
                raise CommandError(f"{name} {text!r} is not accepted: it is not text.")


def _was_writing(error: OSError) -> bool:
    """Whether it was raised by writing the command's output, and not by something that the command did."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(isinstance(frame.f_locals.get("self"), OutputWrapper) for frame in frames)


def _write_nowhere() -> None:
    """The interpreter writes what is left when it ends, and would complain."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
