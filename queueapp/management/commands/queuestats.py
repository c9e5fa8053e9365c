"""``manage.py queuestats``: the state of the queues, once or continuously."""

from __future__ import annotations

import threading
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import CommandError

from ... import registry
from ...messages.escaping import in_one_line
from ...operations.journal import all_journal_figures
from ...operations.statistics import LIMIT, UNKNOWN, QueueFigures, figures, in_words, span
from ..base_command import OperatorCommand

#: Characters that a line shows of a name, which for a queue that is no more is a stranger's, and of anything else.
NAME, TEXT = 100, 1000


class Command(OperatorCommand):
    """Show figures of queues."""

    help = (
        "Show waiting, leased, delayed and poison messages, the age of the oldest waiting one, and the live workers of "
        f"each queue. A table of more than {LIMIT} messages is estimated (~) or counted so far (+), so it is cheap on "
        "tables of any size. What cannot be read is a dash, null in JSON; the cause is said on stderr, and the exit code is "
        "1. --json prints a list of objects; with --watch one such list per line."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("queue", nargs="*", help="Queues by label or table; default: all.")
        parser.add_argument(
            "--journal",
            action="store_true",
            help="Show what is kept of each journaled topic instead, in every database.",
        )
        parser.add_argument("--json", action="store_true", help="Machine-readable output.")
        parser.add_argument("--watch", action="store_true", help="Again and again, until Ctrl-C.")
        parser.add_argument("--interval", type=float, default=2.0, metavar="SECONDS", help="With --watch (default 2).")

    def handle(self, *args: Any, **options: Any) -> None:
        if not 0.1 <= options["interval"] <= 3600:
            raise CommandError(
                f"--interval {options['interval']} is not accepted: it must be from 0.1 to 3600 seconds."
            )
        if options["journal"]:
            if options["queue"] or options["watch"]:
                raise CommandError("--journal goes with neither queues nor --watch.")
            self._show_journals(options["json"])
            return
        # One that was named twice, by label and by table, is shown once.
        queues = list(dict.fromkeys(registry.queues.find(name) for name in options["queue"])) or None
        pause = threading.Event()
        try:
            while True:
                unknown = self._show(queues, options["json"], options["watch"])
                if not options["watch"]:
                    break
                pause.wait(options["interval"])
        except KeyboardInterrupt:
            if not options["watch"]:
                raise  # not everything was shown
            self.stdout.write("")
            return
        if unknown:
            raise CommandError(f"Not everything is known of {unknown} {'queue' if unknown == 1 else 'queues'}.")

    def _show_journals(self, as_json: bool) -> None:
        found = all_journal_figures()
        if as_json:
            self.write_json([one.as_dict() for one in found], indent=2)
            return
        for one in found:
            size = f"about {one.entries} entries, {one.bytes / 2**20:.1f} MiB"
            self.stdout.write(f"The journal in {one.database!r}: {size}, {len(one.topics)} topics")
            for topic in one.topics:
                kept = f"kept for {span(topic.retention_seconds)}" if topic.retention_seconds else "kept for ever"
                left = "" if topic.journaled else "; not journaled any more"
                self.stdout.write(
                    f"  {in_one_line(topic.topic, NAME)}: bookmarks {topic.first_bookmark} to {topic.last_bookmark}, "
                    f"{topic.oldest.isoformat()} to {topic.newest.isoformat()}, {kept}{left}"
                )

    def _show(self, queues: Any, as_json: bool, watch: bool) -> int:
        """Print the figures, and on stderr what is not known; returns of how many queues something is not."""
        found = figures(queues)
        if as_json:
            self.write_json([one.as_dict() for one in found], indent=None if watch else 2)
        else:
            if watch and self.stdout.isatty():
                self.stdout.write("\033[2J\033[H", ending="")
            self._table(found)
        unknown = [one for one in found if one.error]
        for one in unknown:
            self.stderr.write(f"{in_one_line(one.queue, NAME)}: {in_one_line(one.error, TEXT)}")
        return len(unknown)

    def _table(self, found: list[QueueFigures]) -> None:
        lines = [("queue", "waiting", "leased", "oldest", "delayed", "poison", "workers", "")]
        for one in found:
            notes = [
                "paused" if one.paused else "",
                f"{number(one.inactive, one.inactive_exact)} more wait in the journal" if one.inactive else "",
                one.note,
                *(in_one_line(in_words(trouble), TEXT) for trouble in one.breakers),
                "not all is known" if one.error else "",
            ]
            lines.append(
                (
                    in_one_line(one.queue, NAME),
                    number(one.waiting, one.exact, "~{}"),
                    number(one.leased, one.exact),
                    span(one.oldest_seconds),
                    number(one.delayed, one.delayed_exact),
                    number(one.poison, one.poison_exact),
                    number(one.subscribers),
                    "; ".join(filter(None, notes)),
                )
            )
        widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]) - 1)]
        for line in lines:
            cells = [line[0].ljust(widths[0]), *(line[i].rjust(widths[i]) for i in range(1, len(widths)))]
            self.stdout.write("  ".join([*cells, line[-1]]).rstrip())
        for one in found:
            for left in one.stranded:
                self.stdout.write(
                    f"{one.queue}: {in_one_line(str(left), TEXT)}; the oldest is {span(left.oldest_seconds)} old"
                )
            for lone in one.unserved:
                age = f"; the oldest is {span(lone.oldest_seconds)} old" if lone.waiting else ""
                self.stdout.write(f"{one.queue}: {in_one_line(str(lone), TEXT)}{age}")


def number(count: int | None, exact: bool | None = True, otherwise: str = "{}+") -> str:
    """A figure as text: a dash when it is unknown, marked when it is not exact."""
    if count is None:
        return UNKNOWN
    return str(count) if exact else otherwise.format(count)
