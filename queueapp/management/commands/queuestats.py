"""``manage.py queuestats``: the statistics of the queues, once or continuously."""

from __future__ import annotations

import threading
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import CommandError

from ...messages.escaping import in_one_line
from ...operations.journal import all_journal_stats
from ...operations.statistics import LIMIT, UNKNOWN, QueueStats, breaker_text, queue_stats, span, stats_by_name
from ..base_command import OperatorCommand, counted

#: Characters shown of a name, which may come from a message, and of any other text.
NAME, TEXT = 100, 1000


class Command(OperatorCommand):
    """Show the statistics of queues."""

    help = (
        "Show waiting, leased, delayed and poison messages, the age of the oldest waiting one, and the live workers of "
        f"each queue. A table of more than {LIMIT} messages is estimated (~) or counted up to that number (+), so the "
        "command is fast for tables of any size. An unknown value is a dash, null in JSON; its cause is printed on "
        "stderr, and the exit code is 1. --json prints a list of objects; with --watch one such list per line."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "queue", nargs="*", help="Queues by label, by table or as in queuestats (celery:mail); default: all."
        )
        parser.add_argument(
            "--journal",
            action="store_true",
            help="Show the journaled topics of every database instead.",
        )
        parser.add_argument("--json", action="store_true", help="Machine-readable output.")
        parser.add_argument("--watch", action="store_true", help="Repeat until Ctrl-C.")
        parser.add_argument(
            "--interval", type=float, default=2.0, metavar="SECONDS", help="Pause between repeats (default 2)."
        )

    def handle(self, *args: Any, **options: Any) -> None:
        if not 0.1 <= options["interval"] <= 3600:
            raise CommandError(
                f"--interval {options['interval']} is not accepted: it must be from 0.1 to 3600 seconds."
            )
        if options["journal"]:
            if options["queue"] or options["watch"]:
                raise CommandError("--journal cannot be combined with queues or --watch.")
            self._show_journals(options["json"])
            return
        names = options["queue"]
        pause = threading.Event()
        try:
            while True:
                incomplete = self._show(names, options["json"], options["watch"])
                if not options["watch"]:
                    break
                pause.wait(options["interval"])
        except KeyboardInterrupt:
            if not options["watch"]:
                raise  # the output is incomplete
            self.stdout.write("")
            return
        if incomplete:
            raise CommandError(f"Some values of {counted(incomplete, 'queue')} are unknown.")

    def _show_journals(self, as_json: bool) -> None:
        journals = all_journal_stats()
        if as_json:
            self.write_json([journal.as_dict() for journal in journals], indent=2)
            return
        for journal in journals:
            size = f"about {counted(journal.entries, 'entry', 'entries')}, {journal.bytes / 2**20:.1f} MiB"
            topics = counted(len(journal.topics), "topic")
            self.stdout.write(f"Journal of database {journal.database!r}: {size}, {topics}")
            for topic in journal.topics:
                kept = f"kept for {span(topic.retention_seconds)}" if topic.retention_seconds else "kept for ever"
                ended = "" if topic.journaled else "; no longer journaled"
                self.stdout.write(
                    f"  {in_one_line(topic.topic, NAME)}: bookmarks {topic.first_bookmark} to {topic.last_bookmark}, "
                    f"{topic.oldest.isoformat()} to {topic.newest.isoformat()}, {kept}{ended}"
                )

    def _show(self, names: list[str], as_json: bool, watch: bool) -> int:
        """Print the statistics, and on stderr the causes of unknown values; returns the number of queues with any."""
        # A queue that is given twice, by label and by table, is shown once.
        found = stats_by_name(names) if names else queue_stats()
        if as_json:
            self.write_json([stats.as_dict() for stats in found], indent=None if watch else 2)
        else:
            if watch and self.stdout.isatty():
                self.stdout.write("\033[2J\033[H", ending="")
            self._table(found)
        incomplete = [stats for stats in found if stats.error]
        for stats in incomplete:
            self.stderr.write(f"{in_one_line(stats.queue, NAME)}: {in_one_line(stats.error, TEXT)}")
        return len(incomplete)

    def _table(self, found: list[QueueStats]) -> None:
        lines = [("queue", "waiting", "leased", "oldest", "delayed", "poison", "workers", "")]
        for stats in found:
            notes = [
                "paused" if stats.paused else "",
                f"{number(stats.inactive, stats.inactive_exact)} more in the journal" if stats.inactive else "",
                stats.note,
                *(in_one_line(breaker_text(breaker), TEXT) for breaker in stats.breakers),
                "incomplete" if stats.error else "",
            ]
            lines.append(
                (
                    in_one_line(stats.queue, NAME),
                    number(stats.waiting, stats.exact, "~{}"),
                    number(stats.leased, stats.exact),
                    span(stats.oldest_seconds),
                    number(stats.delayed, stats.delayed_exact),
                    number(stats.poison, stats.poison_exact),
                    number(stats.workers),
                    "; ".join(filter(None, notes)),
                )
            )
        widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]) - 1)]
        for line in lines:
            cells = [line[0].ljust(widths[0]), *(line[i].rjust(widths[i]) for i in range(1, len(widths)))]
            self.stdout.write("  ".join([*cells, line[-1]]).rstrip())
        for stats in found:
            for unroutable in stats.unroutable:
                age = span(unroutable.oldest_seconds)
                self.stdout.write(f"{stats.queue}: {in_one_line(str(unroutable), TEXT)}; the oldest is {age} old")
            for consumer in stats.consumers_without_worker:
                age = f"; the oldest is {span(consumer.oldest_seconds)} old" if consumer.waiting else ""
                self.stdout.write(f"{stats.queue}: {in_one_line(str(consumer), TEXT)}{age}")


def number(count: int | None, exact: bool | None = True, inexact: str = "{}+") -> str:
    """A value as text: a dash if it is unknown, marked if it is not exact."""
    if count is None:
        return UNKNOWN
    return str(count) if exact else inexact.format(count)
