"""``manage.py listconsumers``: the subscribed consumers, whether a live worker has them, and how many copies wait."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import CommandError

from ... import registry
from ...messages.escaping import in_one_line
from ...operations.statistics import UNKNOWN, span, subscribed_consumers
from ..base_command import OperatorCommand

#: Characters shown of a name, which may come from a message.
NAME = 200
#: The value of ``ConsumerStats.active`` as text.
ACTIVE = {True: "active", False: "NO LIVE WORKER", None: "unknown (a worker does not report its consumers)"}


class Command(OperatorCommand):
    """Show the subscriptions of consumers."""

    help = (
        "Show the consumers that get a copy of each message of a type, on queues with Delivery.recipients: whether a "
        "live worker has them, how many copies wait, and when they subscribed."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("queue", nargs="*", help="Queues by label or table; default: all with recipients.")
        parser.add_argument("--json", action="store_true", help="Machine-readable output.")

    def handle(self, *args: Any, **options: Any) -> None:
        named = [registry.queues.find(name) for name in options["queue"]]
        queues = list(dict.fromkeys(named)) or [queue for queue in registry.queues if queue.delivery.recipients]
        found = subscribed_consumers(queues)
        for stats in found:
            if stats.error:
                self.stderr.write(f"{stats.queue}: {in_one_line(stats.error, 1000)}")
        consumers = [consumer for stats in found for consumer in stats.consumers]
        if options["json"]:
            self.write_json([consumer.as_dict() for consumer in consumers], indent=2)
        else:
            for consumer_stats in consumers:
                types = ", ".join(in_one_line(kind, NAME) or "messages without a type" for kind in consumer_stats.types)
                waiting = f"{consumer_stats.waiting}{'' if consumer_stats.exact else '+'} waiting"
                age = f", the oldest {span(consumer_stats.oldest_seconds)}" if consumer_stats.waiting else ""
                self.stdout.write(
                    f"{consumer_stats.queue}: {in_one_line(consumer_stats.consumer, NAME)} ({types}): "
                    f"{ACTIVE[consumer_stats.active]}, {waiting}{age}, since {consumer_stats.made_at[:19] or UNKNOWN}, "
                    f"seen {consumer_stats.seen_at[:19] or UNKNOWN}"
                )
        if any(consumer_stats.error for consumer_stats in found):
            raise CommandError("Some values are unknown.")
