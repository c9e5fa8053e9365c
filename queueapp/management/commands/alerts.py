"""``manage.py alerts``: the open alerts, and a test of the notification channels."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import CommandError
from django.db import router

from ... import registry
from ...alerts import channels
from ...alerts.store import open_alerts
from ...messages.escaping import in_one_line
from ..base_command import OperatorCommand


class Command(OperatorCommand):
    """Show open alerts, or send a test alert."""

    help = (
        "Show the open alerts. --test sends a test alert by every channel of QUEUEAPP['ALERTS'] and reports the "
        "channels that fail."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--test", action="store_true", help="Send a test alert by the signal, and by mail and webhook if set."
        )
        parser.add_argument("--json", action="store_true", help="Machine-readable output.")

    def handle(self, *args: Any, **options: Any) -> None:
        if options["test"]:
            self._test(options["json"])
            return
        found = [
            alert | {"database": alias}
            for alias in sorted({router.db_for_read(queue) or "default" for queue in registry.queues})
            for alert in open_alerts(alias)
        ]
        if options["json"]:
            self.write_json([alert | {"since": alert["since"].isoformat()} for alert in found], indent=2)
            return
        for alert in found:
            self.stdout.write(f"{alert['since']:%Y-%m-%d %H:%M:%S} {in_one_line(alert['text'], 500)}")
        if not found:
            self.stdout.write("No open alerts.")

    def _test(self, as_json: bool) -> None:
        errors = {channel: in_one_line(error, 500) for channel, error in channels.send_test().items()}
        for channel, error in () if as_json else errors.items():
            self.stdout.write(f"{channel}: {error or 'sent'}")
        if as_json:
            report = [{"channel": name, "sent": not error, "error": error or None} for name, error in errors.items()]
            self.write_json(report, indent=2)
        if failed := [channel for channel, error in errors.items() if error]:
            raise CommandError(f"The test alert could not be sent by {', '.join(failed)}.")
