"""``manage.py rebuildqueue``: fill a queue from the journal."""

from __future__ import annotations

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from typing import Any

from django.core.management.base import CommandError
from django.db import router

from ... import registry
from ...errors import InvalidOption
from ...models.delivery.topics import POINTS, Point, point_of, underlying_topic
from ...topics.backfill import Filled, QueueFeeder, is_over_journal
from ..base_command import OperatorCommand, Progress

#: Entries that are counted for the progress bar.
COUNTED = 1_000_000


class Command(OperatorCommand):
    """Rebuild a queue."""

    help = """Fill a queue from the journal with messages that it never had, from its recovery point or another point
on.

  manage.py rebuildqueue shop.Orders                           for example after its filter was changed
  manage.py rebuildqueue shop.Orders --from 2026-11-22T10:00Z
  manage.py rebuildqueue shop.Orders --from 4711 --again --yes

Messages that the queue had before do not come back: acked messages stay acked. --again inserts everything since the
point that the queue does not have now, acked messages included, and asks for confirmation unless --yes; messages that
wait, are delayed or are poison are never duplicated. A queue with target_queue_depth gets messages up to that depth;
the dispatcher (runqueueworker, rundelayeddispatcher) inserts the rest later.

The command can be stopped and run again at any time: it inserts no message twice."""

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> Any:
        return super().create_parser(prog_name, subcommand, formatter_class=RawDescriptionHelpFormatter, **kwargs)

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("queue", help="Queue by label or table.")
        parser.add_argument(
            "--from",
            dest="point",
            metavar="POINT",
            help=f"Start: {POINTS}. Default: the queue's recovery_point.",
        )
        parser.add_argument(
            "--again", action="store_true", help="Include messages that the queue had before and does not have now."
        )
        parser.add_argument(
            "--yes", "--no-input", "--noinput", action="store_true", help="Do not ask for confirmation."
        )
        parser.add_argument("--json", action="store_true", help="Print the result as one JSON object.")

    def handle(self, *args: Any, **options: Any) -> None:
        queue = registry.queues.find(options["queue"])
        label, point = queue._meta.label, _point(options["point"])
        if not is_over_journal(queue):
            raise CommandError(
                f"{label} collects {underlying_topic(queue)!r}, which is not journaled (QUEUEAPP.JOURNAL), so it "
                "cannot be filled."
            )
        feeder = QueueFeeder(queue, router.db_for_write(queue))
        if options["again"]:
            feeder.check_refill()
        if options["again"] and not options["yes"]:
            question = f"Insert messages into {label} that were handled before? Type the label to confirm: "
            self.confirm(question, label, "--yes")
        feeder.rebuild(point)
        total = Filled()

        def stopped(_: int) -> str:
            return f"{total.copied} messages were inserted into {label}. Run the command again to continue."

        with self.counting("entries", stopped, feeder.remaining(COUNTED)) as progress:
            while True:
                total = self._add(total, feeder.fill(), progress)
                if not total.more or total.full_with is not None:
                    break
            for filled in feeder.refill(point) if options["again"] else ():
                total = self._add(total, filled, progress)
        self._report(label, feeder, total, options["json"])

    def _add(self, total: Filled, fill: Filled, progress: Progress) -> Filled:
        progress.at(total.read + fill.read)
        return Filled(total.read + fill.read, total.copied + fill.copied, fill.more, fill.full_with)

    def _report(self, label: str, feeder: QueueFeeder, total: Filled, as_json: bool) -> None:
        remaining = feeder.remaining(COUNTED)
        if as_json:
            figures = {"queue": label, "read": total.read, "copied": total.copied, "remaining": remaining}
            self.write_json(figures)
            return
        rest = f" {remaining} more in the journal." if remaining else ""
        self.stdout.write(f"{total.copied} messages were inserted into {label}; {total.read} entries were read.{rest}")


def _point(text: str | None) -> Point | None:
    if text is None:
        return None
    point = point_of(text)
    if point is None:
        raise InvalidOption("--from", text, POINTS)
    return point
