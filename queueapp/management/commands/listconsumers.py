"""``manage.py listconsumers``: who gets a copy of what, who serves it, and what waits."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import CommandError

from ... import registry
from ...messages.escaping import in_one_line
from ...operations.statistics import UNKNOWN, figures, span
from ..base_command import OperatorCommand

#: Characters shown of a name, which anybody may have written.
NAME = 200


class Command(OperatorCommand):
    """Show the subscriptions of consumers."""

    help = (
        "Show the consumers that get a copy of each message of a type, on queues with Delivery.recipients: whether a live worker "
        "serves them, how many copies wait, and since when they subscribe."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("queue", nargs="*", help="Queues by label or table; default: all with recipients.")
        parser.add_argument("--json", action="store_true", help="Machine-readable output.")

    def handle(self, *args: Any, **options: Any) -> None:
        named = [registry.queues.find(name) for name in options["queue"]]
        queues = list(dict.fromkeys(named)) or [one for one in registry.queues if one.delivery.recipients]
        found = figures(queues) if queues else []
        for one in found:
            if one.error:
                self.stderr.write(f"{one.queue}: {in_one_line(one.error, 1000)}")
        consumers = [consumer for one in found for consumer in one.consumers]
        if options["json"]:
            self.write_json([one.as_dict() for one in consumers], indent=2)
        else:
            for each in consumers:
                served = {
                    True: "served",
                    False: "NOT SERVED by a live worker",
                    None: "served or not, a worker does not say",
                }
                types = ", ".join(in_one_line(kind, NAME) or "messages without a type" for kind in each.types)
                waiting = f"{each.waiting}{'' if each.exact else '+'} waiting"
                age = f", the oldest {span(each.oldest_seconds)}" if each.waiting else ""
                self.stdout.write(
                    f"{each.queue}: {in_one_line(each.consumer, NAME)} ({types}): {served[each.served]}, {waiting}{age}, "
                    f"since {each.made_at[:19] or UNKNOWN}, seen {each.seen_at[:19] or UNKNOWN}"
                )
        if any(one.error for one in found):
            raise CommandError("Not everything is known.")
