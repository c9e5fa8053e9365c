"""``manage.py registerconsumers``: subscribe the consumers of this code."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import CommandError
from django.db import router

from ... import registry
from ...operations import subscriptions
from ..base_command import OperatorCommand, counted


class Command(OperatorCommand):
    """Write the subscriptions of consumers."""

    help = (
        "Write the subscriptions of the consumers in this code, as migrate and every worker at its start do: from then "
        "on each send makes a copy for each of them. With a queue and a name: subscribe a consumer that no code "
        "registers, such as a script that calls receive(recipient=...)."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("queue", nargs="?", help="Queue by label or table.")
        parser.add_argument("consumer", nargs="?", help="Name of a consumer that no code registers.")
        parser.add_argument("--type", default="", help="Name of its message type; default: messages without a type.")

    def handle(self, *args: Any, **options: Any) -> None:
        if options["type"] and not options["consumer"]:
            raise CommandError("--type needs a queue and a consumer.")
        if options["consumer"]:
            queue = registry.queues.find(options["queue"])
            new = subscriptions.subscribe(queue, options["consumer"], options["type"])
            self.stdout.write(f"{options['consumer']} {'subscribes' if new else 'subscribed already'}.")
            return
        queues = [registry.queues.find(options["queue"])] if options["queue"] else list(registry.queues)
        aliases = sorted({router.db_for_write(queue) for queue in queues if queue.delivery.recipients})
        count = sum(subscriptions.register(alias, queues) for alias in aliases)
        self.stdout.write(f"{counted(count, 'new subscription')}.")
