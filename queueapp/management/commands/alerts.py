"""``manage.py alerts``: what is the matter now, and a test of the ways that alerts take."""

from __future__ import annotations

from argparse import ArgumentParser
from datetime import UTC, datetime
from typing import Any

from django.core.management.base import CommandError
from django.db import router

from ... import registry
from ...alerts import channels
from ...alerts.options import channels as channels_to_tell
from ...alerts.store import open_alerts
from ...messages.escaping import in_one_line
from ..base_command import OperatorCommand


class Command(OperatorCommand):
    """Show open alerts, or send one as a test."""

    help = "Show the alerts that are not over. --test sends one by every channel of QUEUEAPP['ALERTS'] and says which fails."

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
            one | {"database": alias}
            for alias in sorted({router.db_for_read(queue) or "default" for queue in registry.queues})
            for one in open_alerts(alias)
        ]
        if options["json"]:
            self.write_json([one | {"since": one["since"].isoformat()} for one in found], indent=2)
            return
        for one in found:
            self.stdout.write(f"{one['since']:%Y-%m-%d %H:%M:%S} {in_one_line(one['text'], 500)}")
        if not found:
            self.stdout.write("No open alerts.")

    def _test(self, as_json: bool) -> None:
        notice = channels.Notification("test", "", "", "a test of alerts, nothing is the matter", "", datetime.now(UTC))
        wrong: dict[str, str] = {}
        for channel in channels_to_tell():
            wrong[channel] = ""
            try:
                channels.tell(channel, notice)
            except Exception as error:
                wrong[channel] = in_one_line(channels.why(error), 500)
            if not as_json:
                self.stdout.write(f"{channel}: {wrong[channel] or 'told'}")
        if as_json:
            said = [{"channel": one, "told": not error, "error": error or None} for one, error in wrong.items()]
            self.write_json(said, indent=2)
        if failed := [channel for channel, error in wrong.items() if error]:
            raise CommandError(f"The test alert could not be told by {', '.join(failed)}.")
