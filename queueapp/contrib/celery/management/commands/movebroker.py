"""``manage.py movebroker``: moves the messages of one Celery broker to another one, while both are in use."""

from __future__ import annotations

import json
import signal
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable
from datetime import timedelta
from time import monotonic
from typing import Any

from django.core.management.base import CommandError
from django.db import Error

from .....management.base_command import INTERRUPTED, OperatorCommand, Progress
from .....messages.escaping import in_one_line
from .....operations.error_hints import explain
from .....services.leader_election import TERM

#: Seconds to wait for the lock of another migrator, which may have been killed.
_MAX_WAIT = 20.0
_TERM = TERM.total_seconds()
#: Seconds between two progress lines where stderr is not a terminal.
PROGRESS_EVERY = 10.0


class Command(OperatorCommand):
    """Move the messages of one Celery broker to another one."""

    help = """Move the messages of one Celery broker to another one: ready and delayed messages (ETA, countdown), with
their priorities, and the messages of dead workers. One of the two brokers is queueapp://.

  manage.py movebroker --from redis://localhost:6379/0 --to queueapp://             until the source is empty
  manage.py movebroker --from redis://localhost:6379/0 --to queueapp:// --follow    and later messages, until Ctrl-C
  manage.py movebroker --from queueapp:// --to redis://localhost:6379/0             back again
  manage.py movebroker --from amqp://localhost// --to queueapp:// --queue celery    other brokers: name the queues
  manage.py movebroker --from redis://localhost:6379/0 --to queueapp:// --put-back  give up an interrupted move

Producers and workers of both brokers may continue; a message in flight stays with its worker until that acks or
releases it. After an interrupt or a crash the same command continues the move: between this database and Redis no
message is lost or duplicated; with other brokers the last 20 messages before a crash may be duplicated."""

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> Any:
        return super().create_parser(prog_name, subcommand, formatter_class=RawDescriptionHelpFormatter, **kwargs)

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--from", dest="source", required=True, metavar="URL", help="The broker to move from.")
        parser.add_argument("--to", dest="target", required=True, metavar="URL", help="The broker to move to.")
        parser.add_argument(
            "--queue",
            action="append",
            dest="queues",
            metavar="NAME",
            help="Queue name. Repeatable. Default: all without an expiry.",
        )
        parser.add_argument("--follow", action="store_true", help="Continue with later messages, until Ctrl-C.")
        parser.add_argument(
            "--put-back",
            action="store_true",
            help="Return the messages taken out by an interrupted move.",
        )
        parser.add_argument(
            "--keep-priorities",
            action="store_true",
            help=(
                "Keep the priority numbers. By default they are reversed between Redis, where 0 is first, and other "
                "brokers."
            ),
        )
        parser.add_argument(
            "--term",
            default=f"{_TERM:g}",
            metavar="SECONDS",
            help=f"Seconds after which the lock of a killed movebroker expires: 2 to {_TERM:g} (default {_TERM:g}). "
            "Must be longer than a batch of 500 messages takes.",
        )
        for end in ("from", "to"):
            parser.add_argument(
                f"--{end}-options",
                default="{}",
                metavar="JSON",
                help=f'broker_transport_options of --{end}, as {{"global_keyprefix": "shop:"}}.',
            )
        parser.add_argument("--json", action="store_true", help="Write the result as one JSON object.")

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            from ...broker_migration import Migrator, broker_at
        except ImportError as error:
            raise CommandError(f"{error}: install queueapp[celery] and the driver of the other broker.") from None
        term = _term(options["term"])
        source = _connect(broker_at, options["source"], "--from", options["from_options"])
        target = _connect(broker_at, options["target"], "--to", options["to_options"])
        migrator = Migrator(source, target, keep_priorities=options["keep_priorities"], term=term)
        if options["queues"] is None and not migrator.names_queues:
            raise CommandError(
                f"{_without_password(options['source'])} cannot list its queues: name them with --queue."
            )
        try:
            with migrator.exclusive(_MAX_WAIT):
                if options["put_back"]:
                    count = migrator.put_back(options["queues"])
                    self._end(options, migrator, f"{_messages(count)} returned.", put_back=count)
                else:
                    self._move(migrator, options)
        finally:
            migrator.close()

    def _move(self, migrator: Any, options: dict[str, Any]) -> None:
        names = options["queues"] if options["queues"] is not None else migrator.source.queues()
        total = sum(sum(migrator.source.remaining(name)) for name in names) if not options["follow"] else None
        progress = Progress(self.stderr, "messages", total)
        shown: dict[str, str] = {}
        next_notes_at, next_line_at = monotonic(), monotonic() + PROGRESS_EVERY

        def report_progress() -> None:
            nonlocal next_notes_at, next_line_at
            progress.at(migrator.moved)
            if not self.stderr.isatty() and monotonic() >= next_line_at:
                next_line_at = monotonic() + PROGRESS_EVERY
                self.stderr.write(_progress_line(migrator, options["queues"]))
            if monotonic() < next_notes_at:
                return
            next_notes_at = monotonic() + 1.0
            for queue, note in migrator.notes.items():
                if note and shown.get(queue) != note:
                    shown[queue] = note
                    progress.end()
                    self.stderr.write(f"{in_one_line(queue, 100)}: {note}")

        before = {
            number: signal.signal(number, lambda *_: migrator.stopping.set())
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            migrator.run(options["queues"], follow=options["follow"], report_progress=report_progress)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            progress.end()
        if migrator.stopping.is_set() and not options["follow"]:
            text = f"Stopped; {_messages(migrator.moved)} moved. The same command continues."
            raise CommandError(text, returncode=INTERRUPTED)
        self._end(options, migrator, f"{_messages(migrator.moved)} moved.", moved=migrator.moved)

    def _end(self, options: dict[str, Any], migrator: Any, text: str, **reported: int) -> None:
        unreadable = migrator.source.unreadable
        if options["json"]:
            self.write_json({**reported, "unreadable": unreadable})
            return
        self.stdout.write(text)
        if unreadable:
            self.stdout.write(
                f"{_messages(unreadable)} not moved: kombu did not write them, and no other broker could store them."
            )


def _messages(count: int) -> str:
    return f"{count} message{'' if count == 1 else 's'}"


def _progress_line(migrator: Any, queues: list[str] | None) -> str:
    """A line for logs, where no progress bar is shown."""
    names = queues if queues is not None else migrator.source.queues()
    remaining = {name: sum(migrator.source.remaining(name)) for name in names}
    parts = [f"{in_one_line(name, 100)}: {count}" for name, count in remaining.items() if count]
    return f"{_messages(migrator.moved)} moved; remaining: {', '.join(parts) or 'none'}"


def _term(text: str) -> timedelta:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 2 <= seconds <= _TERM:
        raise CommandError(f"--term {text!r} is not accepted: 2 to {_TERM:g} seconds.")
    return timedelta(seconds=seconds)


def _connect(broker_at: Callable[..., Any], url: str, option: str, given: str) -> Any:
    try:
        transport_options = json.loads(given)
        if not isinstance(transport_options, dict):
            raise ValueError("it must be an object")
    except ValueError as error:
        raise CommandError(f"{option}-options {given!r} is not accepted: {error}.") from None
    try:
        return broker_at(url, **transport_options)
    except CommandError:
        raise
    except Exception as error:  # drivers raise errors of any class
        # Celery's library wraps the error of this package.
        cause = error if isinstance(error, Error) else error.__cause__ or error.__context__
        hint = explain(cause) if isinstance(cause, Error) else None
        why = hint or f"{type(error).__name__}: {in_one_line(str(error), 300)}"
        raise CommandError(f"{option} {_without_password(url)} cannot be used: {why}") from None


def _without_password(url: str) -> str:
    """The URL without its password."""
    from kombu.utils.url import maybe_sanitize_url

    return str(maybe_sanitize_url(url))
