"""``manage.py movebroker``: what waits in one Celery broker is moved into another one, while both are in use."""

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

from .....management.base_command import INTERRUPTED, OperatorCommand
from .....management.progress import Progress
from .....messages.escaping import in_one_line
from .....operations.error_hints import explain
from .....services.leader_election import TERM

#: Seconds to wait for another migrator, which may be one that was killed.
_TAKES_OVER = 20.0
_TERM = TERM.total_seconds()


class Command(OperatorCommand):
    """Move a broker."""

    help = """Move the messages that wait in one Celery broker into another one: ready, delayed (ETA, countdown), with priority, and
those that workers had which are gone. One of the two is ours.

  manage.py movebroker --from redis://localhost:6379/0 --to queueapp://             until nothing is left
  manage.py movebroker --from redis://localhost:6379/0 --to queueapp:// --follow    and what comes later, until Ctrl-C
  manage.py movebroker --from queueapp:// --to redis://localhost:6379/0             back again
  manage.py movebroker --from amqp://localhost// --to queueapp:// --queue celery    of other brokers: name the queues
  manage.py movebroker --from redis://localhost:6379/0 --to queueapp:// --put-back  give an interrupted move up

Producers and workers of both sides go on meanwhile; a message that a live worker has is its own until it is done or gives it
back. A move that was interrupted or killed is taken up where it was by the same command: between our database and Redis
nothing is lost or there twice; of another broker the last 20 messages before a kill may be there twice."""

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> Any:
        return super().create_parser(prog_name, subcommand, formatter_class=RawDescriptionHelpFormatter, **kwargs)

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--from", dest="source", required=True, metavar="URL", help="The broker to move from.")
        parser.add_argument("--to", dest="target", required=True, metavar="URL", help="The broker to move to.")
        parser.add_argument(
            "--queue", action="append", dest="queues", metavar="NAME", help="A queue (default: all that stay)."
        )
        parser.add_argument("--follow", action="store_true", help="Go on with what comes, until Ctrl-C.")
        parser.add_argument("--put-back", action="store_true", help="Give back what an interrupted move has set aside.")
        parser.add_argument(
            "--keep-priorities",
            action="store_true",
            help="Keep the numbers. Else they are counted from the other end between Redis, where 0 is received first, and others.",
        )
        parser.add_argument(
            "--term",
            default=f"{_TERM:g}",
            metavar="SECONDS",
            help=f"So long after it was killed another may go on: 2 to {_TERM:g} (default {_TERM:g}). A batch of 500 messages must not "
            "take longer where another one waits.",
        )
        for end in ("from", "to"):
            parser.add_argument(
                f"--{end}-options",
                default="{}",
                metavar="JSON",
                help=f'broker_transport_options of --{end}, as {{"global_keyprefix": "shop:"}}.',
            )
        parser.add_argument("--json", action="store_true", help="Say at the end what was done as one JSON object.")

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            from ...broker_migration import Migrator, broker_at
        except ImportError as error:
            raise CommandError(f"{error}: install queueapp[celery] and the driver of the other broker.") from None
        term = _term(options["term"])
        source = _reached(broker_at, options["source"], "--from", options["from_options"])
        target = _reached(broker_at, options["target"], "--to", options["to_options"])
        migrator = Migrator(source, target, keep_priorities=options["keep_priorities"], term=term)
        if options["queues"] is None and not migrator.names_queues:
            raise CommandError(f"{_shown(options['source'])} does not say which queues it has: name them with --queue.")
        try:
            with migrator.alone(_TAKES_OVER):
                if options["put_back"]:
                    count = migrator.put_back(options["queues"])
                    self._end(options, migrator, f"{count} messages were put back.", put_back=count)
                else:
                    self._move(migrator, options)
        finally:
            migrator.close()

    def _move(self, migrator: Any, options: dict[str, Any]) -> None:
        names = options["queues"] if options["queues"] is not None else migrator.source.queues()
        total = sum(sum(migrator.source.left(name)) for name in names) if not options["follow"] else None
        progress = Progress(self.stderr, "messages", total)
        said: dict[str, str] = {}
        next_at = monotonic()

        def told() -> None:
            nonlocal next_at
            progress.at(migrator.moved)
            if monotonic() < next_at:
                return
            next_at = monotonic() + 1.0
            for queue, note in migrator.notes.items():
                if note and said.get(queue) != note:
                    said[queue] = note
                    progress.end()
                    self.stderr.write(f"{in_one_line(queue, 100)}: {note}")

        before = {
            number: signal.signal(number, lambda *_: migrator.stopping.set())
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            migrator.run(options["queues"], follow=options["follow"], told=told)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            progress.end()
        if migrator.stopping.is_set() and not options["follow"]:
            text = f"Stopped; {migrator.moved} messages were moved. The same command goes on."
            raise CommandError(text, returncode=INTERRUPTED)
        self._end(options, migrator, f"{migrator.moved} messages were moved.", moved=migrator.moved)

    def _end(self, options: dict[str, Any], migrator: Any, text: str, **said: int) -> None:
        odd = migrator.source.unreadable
        if options["json"]:
            self.write_json({**said, "unreadable": odd})
            return
        self.stdout.write(text)
        if odd:
            self.stdout.write(
                f"{odd} messages stay: they were not written by kombu, and no other broker could take them."
            )


def _term(text: str) -> timedelta:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 2 <= seconds <= _TERM:
        raise CommandError(f"--term {text!r} is not accepted: 2 to {_TERM:g} seconds.")
    return timedelta(seconds=seconds)


def _reached(broker_at: Callable[..., Any], url: str, option: str, given: str) -> Any:
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
    except Exception as error:  # whatever a driver raises
        # What our own side raises is within the error of Celery's library.
        cause = error if isinstance(error, Error) else error.__cause__ or error.__context__
        ours = explain(cause) if isinstance(cause, Error) else None
        why = ours or f"{type(error).__name__}: {in_one_line(str(error), 300)}"
        raise CommandError(f"{option} {_shown(url)} cannot be used: {why}") from None


def _shown(url: str) -> str:
    """A URL without its password."""
    from kombu.utils.url import maybe_sanitize_url

    return str(maybe_sanitize_url(url))
