"""``manage.py ledger``: whether the messages that came into a queue are those that left it and those that are there."""

from __future__ import annotations

from argparse import ArgumentParser
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from django.core.management.base import CommandError

from ... import registry
from ...messages.escaping import in_one_line
from ...operations import ledger
from ..base_command import OperatorCommand, counted


class Command(OperatorCommand):
    """Check the ledgers of queues."""

    help = (
        "Check the ledgers of the queues with ledger = True: opening + sent = acked + expired + removed + waiting + "
        "delayed + poison. Exits with 1 if one does not close. --accept takes the rows that are there as a new opening "
        "balance, after you have found out why it did not close."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("queue", nargs="*", help="Queues by label or table; none: all queues with a ledger.")
        what = parser.add_mutually_exclusive_group()
        what.add_argument(
            "--accept", metavar="NOTE", help="Open the ledger of one queue anew; the reason, for the log."
        )
        what.add_argument("--minutes", type=int, metavar="N", help="Show what came and went in each of N minutes.")
        parser.add_argument("--json", action="store_true", help="Machine-readable output.")

    def handle(self, *args: Any, **options: Any) -> None:
        queues = [registry.queues.find(name) for name in options["queue"]] or ledger.with_ledger(registry.queues)
        if options["accept"] is not None:
            if len(options["queue"]) != 1:
                raise CommandError("--accept needs the name of one queue.")
            ledger.accept(queues[0], options["accept"])
        if options["minutes"] is not None:
            self._show_minutes(queues, timedelta(minutes=max(1, min(options["minutes"], 10_000))), options["json"])
            return
        found = [ledger.check_now(queue) for queue in queues]
        if options["json"]:
            self.write_json([asdict(balance) | {"closes": balance.closes} for balance in found], indent=2)
        else:
            for balance in found:
                self.stdout.write(in_one_line(_line(balance), 500))
            if not found:
                self.stdout.write("No queue has a ledger.")
        if open_ones := [balance for balance in found if not balance.closes]:
            raise CommandError(f"{counted(len(open_ones), 'ledger')} of {len(found)} did not close.")

    def _show_minutes(self, queues: list[Any], last: timedelta, as_json: bool) -> None:
        rows = [
            {"queue": queue._meta.label, "minute": minute.isoformat(), **row._asdict()}
            for queue in queues
            for minute, row in ledger.minutes(queue, last).items()
        ]
        if as_json:
            self.write_json(rows, indent=2)
            return
        for row in rows:
            self.stdout.write(
                f"{row['minute'][:16]} {row['queue']}: sent {row['sent']}, acked {row['acked']}, expired "
                f"{row['expired']}, removed {row['removed']}"
            )


def _line(balance: ledger.Balance) -> str:
    there = f"{balance.waiting} waiting + {balance.delayed} delayed + {balance.poison} poison"
    equation = (
        f"{balance.opening} at the opening + {balance.sent} sent = {balance.acked} acked + {balance.expired} expired "
        f"+ {balance.removed} removed + {there}"
    )
    differences = ledger.words_of(balance.differences)
    return f"{balance.queue}: {equation}: " + (f"does not close: {differences}" if differences else "closes")
