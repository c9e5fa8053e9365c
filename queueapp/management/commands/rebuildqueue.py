"""``manage.py rebuildqueue``: fill a queue from the journal."""

from __future__ import annotations

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from typing import Any

from django.core.management.base import CommandError
from django.db import router

from ... import registry
from ...errors import InvalidOption
from ...models.delivery.journal import POINTS, Point, point_of
from ...models.delivery.topics import underlying_topic
from ...topics.backfill import Filled, QueueFeeder, is_over_journal
from ..base_command import OperatorCommand
from ..progress import Progress

#: Entries that are counted for the progress bar.
COUNTED = 1_000_000


class Command(OperatorCommand):
    """Rebuild a queue."""

    help = """Fill a queue from the journal with what never entered it, from its recovery point or another point on.

  manage.py rebuildqueue shop.Orders                           after its filter was changed, say
  manage.py rebuildqueue shop.Orders --from 2026-11-22T10:00Z
  manage.py rebuildqueue shop.Orders --from 4711 --again --yes

What the queue took when it was published, or got from the journal before, does not come back: acked messages stay acked.
--again puts in everything since the point that is not there any more, acked messages too, and asks first unless --yes; what
still waits, is delayed or is poison is never doubled. A queue with target_queue_depth gets as many as it has room for,
and the rest as room comes, from the process that dispatches (runqueueworker, rundelayeddispatcher).

Can be stopped and run again at any time: nothing is put in twice."""

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> Any:
        return super().create_parser(prog_name, subcommand, formatter_class=RawDescriptionHelpFormatter, **kwargs)

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("queue", help="Queue by label or table.")
        parser.add_argument(
            "--from",
            dest="point",
            metavar="POINT",
            help=f"Where to begin: {POINTS}. Default: the queue's recovery_point.",
        )
        parser.add_argument(
            "--again", action="store_true", help="Also what had entered it before and is no longer there."
        )
        parser.add_argument("--yes", "--no-input", "--noinput", action="store_true", help="Do not ask.")
        parser.add_argument("--json", action="store_true", help="Print the figures as one JSON object.")

    def handle(self, *args: Any, **options: Any) -> None:
        queue = registry.queues.find(options["queue"])
        label, point = queue._meta.label, _point(options["point"])
        if not is_over_journal(queue):
            raise CommandError(
                f"{label} collects {underlying_topic(queue)!r}, which is not journaled (QUEUEAPP.JOURNAL): there is nothing to "
                "fill it from."
            )
        feeder = QueueFeeder(queue, router.db_for_write(queue))
        if options["again"]:
            feeder.check_refill()
        if options["again"] and not options["yes"]:
            question = f"Put messages into {label} again that were handled before? Type the label to confirm: "
            self.confirm(question, label, "--yes")
        feeder.rebuild(point)
        total = Filled()

        def stopped(_: int) -> str:
            return f"{total.copied} messages were put into {label}. Run it again to go on."

        with self.counting("entries", stopped, feeder.remaining(COUNTED)) as progress:
            while True:
                total = self._add(total, feeder.fill(), progress)
                if not total.more or total.full_with is not None:
                    break
            for one in feeder.refill(point) if options["again"] else ():
                total = self._add(total, one, progress)
        self._tell(label, feeder, total, options["json"])

    def _add(self, total: Filled, one: Filled, progress: Progress) -> Filled:
        progress.at(total.read + one.read)
        return Filled(total.read + one.read, total.copied + one.copied, one.more, one.full_with)

    def _tell(self, label: str, feeder: QueueFeeder, total: Filled, as_json: bool) -> None:
        left = feeder.remaining(COUNTED)
        if as_json:
            figures = {"queue": label, "read": total.read, "copied": total.copied, "left": left}
            self.write_json(figures)
            return
        rest = f" {left} more wait in the journal." if left else ""
        self.stdout.write(f"{total.copied} messages were put into {label}; {total.read} entries were looked at.{rest}")


def _point(text: str | None) -> Point | None:
    if text is None:
        return None
    point = point_of(text)
    if point is None:
        raise InvalidOption("--from", text, POINTS)
    return point
