"""The base of the commands: what an operator can mend is one line and an exit code, never a traceback.

``--traceback`` shows where it was raised.
"""

from __future__ import annotations

import io
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from django.core.management.base import BaseCommand, CommandError, OutputWrapper
from django.db import DEFAULT_DB_ALIAS, Error, connections

from ..operations.error_hints import explain
from ..sql import ErrorKind, backend_of
from .progress import Progress

#: Exit codes as a shell has them for whoever is ended by SIGINT, or by SIGPIPE.
INTERRUPTED, NOBODY_READS = 130, 141


class OperatorCommand(BaseCommand):
    """A command that translates what ``operating.explaining`` knows into CommandError. Who reads ``--json`` reads an error, too."""

    #: The arguments of the command line, where there is one.
    _given: Sequence[str] = ()
    #: Whether JSON was written already: what follows would spoil it.
    _has_written_json = False

    def write_json(self, value: Any, indent: int | None = None) -> None:
        """One JSON document, or a line of several, on stdout."""
        self._has_written_json = True
        self.stdout.write(json.dumps(value, indent=indent))

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> Any:
        """Django's; what it finds wrong with the arguments is an object on stdout as well where ``--json`` is among them."""
        parser = super().create_parser(prog_name, subcommand, **kwargs)
        usage: Callable[[str], NoReturn] = parser.error

        def error(message: str) -> NoReturn:
            asked = any(option.dest == "json" for option in parser._actions) and "--json" in self._given
            if asked:
                self._write_error(CommandError(message))
            usage(message)

        parser.error = error  # type: ignore[method-assign]
        return parser

    def run_from_argv(self, argv: list[str]) -> None:
        """Django's. The arguments are kept for an error that is found before they are read."""
        self._given = argv[2:]
        super().run_from_argv(argv)

    def execute(self, *args: Any, **options: Any) -> Any:
        """Django's, with each error that an operator can mend as CommandError; with ``--json`` as an object on stdout as well."""
        self._has_written_json = False
        try:
            return self._execute(*args, **options)
        except CommandError as error:
            if options.get("json") and not self._has_written_json:
                self._write_error(error)
            raise

    def _write_error(self, error: CommandError) -> None:
        try:
            self.write_json({"error": str(error)})
            self.stdout.flush()
        except OSError:
            pass  # nobody can read it, or there is no room; it is on stderr

    def _execute(self, *args: Any, **options: Any) -> Any:
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

    def check_migrations(self) -> None:
        """Django's: says what is not applied, and no more. A role with the rights of docs/privileges.md may not read what was."""
        try:
            super().check_migrations()
        except Error as error:
            if backend_of(connections[DEFAULT_DB_ALIAS]).error_kind(error) is not ErrorKind.DENIED:
                raise

    @contextmanager
    def counting(self, what: str, stopped: Callable[[int], str], total: int | None = None) -> Iterator[Progress]:
        """The progress of what is done within, batch by batch. Ctrl-C ends the command with what ``stopped`` says of the count:
        each batch is a transaction, so what is done stays done."""
        progress = Progress(self.stderr, what, total)
        try:
            yield progress
        except KeyboardInterrupt:
            raise CommandError(f"Stopped; {stopped(progress.count)}", returncode=INTERRUPTED) from None
        finally:
            progress.end()

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


def counted(count: int, singular: str, plural: str = "") -> str:
    """ "1 queue", "3 queues"."""
    return f"{count} {singular if count == 1 else plural or singular + 's'}"


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
