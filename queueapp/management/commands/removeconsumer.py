"""``manage.py removeconsumer``: remove a consumer's subscriptions, and optionally purge or move its copies."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import CommandError
from django.db import router

from ... import registry
from ...messages.escaping import in_one_line
from ...operations import subscriptions
from ...operations.live_workers import live_on
from ..base_command import OperatorCommand, counted


class Command(OperatorCommand):
    """Remove the subscriptions of a consumer."""

    help = (
        "Remove the subscriptions of a consumer of a queue. The copies that wait for it, delayed ones included, stay "
        "unless --purge or --move-to is given. Refused while a live worker has the consumer, or does not report its "
        "consumers: it would subscribe it again at its next start. Stop the worker first, or use --force. --rename-to "
        "gives the subscriptions and the copies to another consumer."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("queue", help="Queue by label or table.")
        parser.add_argument("consumer", help="Name of the consumer, as listconsumers shows it.")
        choice = parser.add_mutually_exclusive_group()
        choice.add_argument("--purge", action="store_true", help="Delete the copies that wait for it.")
        choice.add_argument("--move-to", metavar="CONSUMER", help="Address the copies to this consumer of the queue.")
        choice.add_argument("--rename-to", metavar="CONSUMER", help="Give subscriptions and copies to this name.")
        parser.add_argument("--force", action="store_true", help="Remove it even if a live worker has it.")

    def handle(self, *args: Any, **options: Any) -> None:
        queue, name = registry.queues.find(options["queue"]), options["consumer"]
        label, shown = queue._meta.label, in_one_line(name, 200)
        subscriptions.require_known_consumer(queue, router.db_for_write(queue), name)
        live = live_on(router.db_for_write(queue), [label])[label]
        if not options["force"] and not options["rename_to"]:
            if live.recipients is None:
                raise CommandError(
                    f"A live worker of {label} does not report its consumers, and '{shown}' may be one of them. "
                    "Nothing was changed; use --force to remove it."
                )
            if name in live.recipients:
                raise CommandError(
                    f"A live worker of {label} has the consumer '{shown}'. Nothing was changed; use --force to remove "
                    "it."
                )
        if options["rename_to"]:
            moved = subscriptions.rename(queue, name, options["rename_to"])
            self.stdout.write(
                f"{shown} was renamed to {in_one_line(options['rename_to'], 200)}; {copies(moved)} moved."
            )
            return
        if options["move_to"]:
            subscriptions.require_consumer(queue, router.db_for_write(queue), name, options["move_to"])
        gone = subscriptions.unsubscribe(queue, name)
        self.stdout.write(f"{counted(gone, 'subscription')} of {shown} removed from {label}.")
        if options["purge"]:
            self.stdout.write(f"{copies(subscriptions.purge_copies(queue, name))} deleted.")
        elif options["move_to"]:
            moved = subscriptions.move_copies(queue, name, options["move_to"])
            self.stdout.write(f"{copies(moved)} moved to {in_one_line(options['move_to'], 200)}.")


def copies(count: int) -> str:
    """ "1 copy", "3 copies"."""
    return counted(count, "copy", "copies")
