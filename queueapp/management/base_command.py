"""The base of the commands: an error that an operator can fix is one line and an exit code, not a traceback.

``--traceback`` shows the traceback.
"""

from __future__ import annotations

import io
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Any, NoReturn

from django.core.management.base import BaseCommand, CommandError, OutputWrapper
from django.db import DEFAULT_DB_ALIAS, Error, connections

from ..errors import did_you_mean
from ..operations.error_hints import explain
from ..sql import ErrorKind, backend_of

#: Exit codes of a shell for a process that SIGINT or SIGPIPE ended.
INTERRUPTED, PIPE_CLOSED = 130, 141


class OperatorCommand(BaseCommand):
    """A command that translates the errors of ``operations.error_hints`` to CommandError. With ``--json`` errors are
    JSON as well."""

    #: The arguments of the command line, where there is one.
    _given: Sequence[str] = ()
    #: Whether JSON was written already: a second document would make the output invalid.
    _has_written_json = False

    def write_json(self, value: Any, indent: int | None = None) -> None:
        """One JSON document, or a line of several, on stdout."""
        self._has_written_json = True
        self.stdout.write(json.dumps(value, indent=indent))

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> Any:
        """Django's parser. With ``--json`` among the arguments, a usage error is an object on stdout as well."""
        parser = super().create_parser(prog_name, subcommand, **kwargs)
        usage: Callable[[str], NoReturn] = parser.error

        def error(message: str) -> NoReturn:
            unknown = next((word.split("=")[0] for word in message.split() if word.startswith("--")), "")
            known = [text for option in parser._actions for text in option.option_strings if text.startswith("--")]
            if message.startswith("unrecognized arguments") and (hint := did_you_mean(unknown, known)):
                message = f"{message}; {hint}"
            asked = any(option.dest == "json" for option in parser._actions) and "--json" in self._given
            if asked:
                self._write_error(CommandError(message))
            usage(message)

        parser.error = error  # type: ignore[method-assign]
        return parser

    def run_from_argv(self, argv: list[str]) -> None:
        """Keep the arguments for errors before parsing; then Django's."""
        self._given = argv[2:]
        super().run_from_argv(argv)

    def execute(self, *args: Any, **options: Any) -> Any:
        """Django's, with each error that an operator can fix as CommandError; with ``--json`` as an object on stdout as
        well."""
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
            pass  # stdout is closed or full; the error is on stderr

    def _execute(self, *args: Any, **options: Any) -> Any:
        _refuse_invalid_text(options)
        for stream in (sys.stdout, sys.stderr):
            # Characters that the locale lacks are escaped, so that the rest is shown.
            if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
                stream.reconfigure(errors="backslashreplace")
        try:
            result = super().execute(*args, **options)
            # Flush here: an error at the end of the interpreter could not be reported.
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
            _discard_output()
            if isinstance(error, BrokenPipeError):
                sys.exit(PIPE_CLOSED)  # ``| head``: the reader has closed the pipe
            raise CommandError(f"The output cannot be written: {error.strerror}.") from error
        except Exception as error:
            line = explain(error)
            if line is None:
                raise
            raise CommandError(line) from error

    def check_migrations(self) -> None:
        """Django's warning about unapplied migrations. A role with the privileges of docs/privileges.md may not read
        their table."""
        try:
            super().check_migrations()
        except Error as error:
            if backend_of(connections[DEFAULT_DB_ALIAS]).error_kind(error) is not ErrorKind.DENIED:
                raise

    @contextmanager
    def counting(self, what: str, stopped: Callable[[int], str], total: int | None = None) -> Iterator[Progress]:
        """Show the progress of the block, batch by batch. Ctrl-C ends the command with the text that ``stopped``
        returns for the count: each batch is a transaction, so the finished ones stay."""
        progress = Progress(self.stderr, what, total)
        try:
            yield progress
        except KeyboardInterrupt:
            raise CommandError(f"Stopped; {stopped(progress.count)}", returncode=INTERRUPTED) from None
        finally:
            progress.end()

    def confirm(self, question: str, answer: str, instead: str) -> None:
        """Ask for confirmation by typing ``answer``. Raises CommandError for any other answer, and without a terminal;
        ``instead`` is the option that confirms in advance."""
        if sys.stdin is None or not sys.stdin.isatty():
            raise CommandError(
                f"There is no terminal for the confirmation: pass {instead} to confirm. Nothing was done."
            )
        try:
            typed = input(question).strip()
        except (EOFError, KeyboardInterrupt) as error:
            self.stdout.write("")
            interrupted = isinstance(error, KeyboardInterrupt)
            raise CommandError("Nothing was done.", returncode=INTERRUPTED if interrupted else 1) from error
        if typed != answer:
            raise CommandError("Nothing was done.")


def counted(count: int, singular: str, plural: str = "") -> str:
    """ "1 queue", "3 queues"."""
    return f"{count} {singular if count == 1 else plural or singular + 's'}"


def _refuse_invalid_text(options: dict[str, Any]) -> None:
    """Raise CommandError for a NUL, and for bytes that are not in the encoding of the terminal: databases accept
    neither."""
    for name, value in options.items():
        for text in value if isinstance(value, list | tuple) else [value]:
            if isinstance(text, str) and ("\0" in text or any("\ud800" <= c <= "\udfff" for c in text)):
                raise CommandError(f"{name} {text!r} is not accepted: it is not text.")


def _was_writing(error: OSError) -> bool:
    """Whether writing the command's output raised the error, and not the command's work."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(isinstance(frame.f_locals.get("self"), OutputWrapper) for frame in frames)


def _discard_output() -> None:
    """Redirect stdout to /dev/null: the interpreter flushes it at its end, which would fail again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


# -- progress ----------------------------------------------------------------------------------------------------------
# The progress of a command: one line on stderr, if that is a terminal.


#: Seconds between two updates of the line.
UPDATE_INTERVAL = 0.2
_WIDTH = 30


class Progress:
    """A bar if the total is known, else a count."""

    def __init__(self, stderr: Any, what: str, total: int | None = None) -> None:
        self._stderr, self._what, self._total = stderr, what, total
        self._shown = sys.stderr is not None and bool(stderr.isatty())
        self._next_at = 0.0
        self._written = False
        #: The number that is done.
        self.count = 0

    def at(self, count: int) -> None:
        """Set the number that is done."""
        self.count = count
        if not self._shown or monotonic() < self._next_at:
            return
        self._next_at = monotonic() + UPDATE_INTERVAL
        self._written = True
        self._stderr.write("\r" + self.line(count), ending="")
        self._stderr.flush()

    def line(self, count: int) -> str:
        """The text of the line."""
        if not self._total:
            return f"{count} {self._what}"
        share = min(1.0, count / self._total)
        bar = "#" * int(share * _WIDTH)
        return f"[{bar:<{_WIDTH}}] {share:4.0%} {count} of {self._total} {self._what}"

    def end(self) -> None:
        """End the line."""
        if self._written:
            self._stderr.write("")
