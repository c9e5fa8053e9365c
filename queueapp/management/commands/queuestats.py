"""``manage.py queuestats``: the state of the queues, once or continuously."""

from __future__ import annotations

import json
import threading
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import CommandError

from ... import registry
from ...operating.statistics import LIMIT, figures, span
from ..operator_command import OperatorCommand


class Command(OperatorCommand):
    """Show figures of queues."""

    help = (
        "Show waiting, leased, delayed and poison messages, the age of the oldest waiting one, and the live workers of "
        f"each queue. Counting stops at {LIMIT} (shown with a +), so it is cheap on tables of any size. "
        "--json prints a list of objects; with --watch one such list per line."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("queue", nargs="*", help="Queues by label or table; default: all.")
        parser.add_argument("--json", action="store_true", help="Machine-readable output.")
        parser.add_argument("--watch", action="store_true", help="Again and again, until Ctrl-C.")
        parser.add_argument("--interval", type=float, default=2.0, metavar="SECONDS", help="With --watch (default 2).")

    def handle(self, *args: Any, **options: Any) -> None:
        if not 0.1 <= options["interval"] <= 3600:
            raise CommandError(
                f"--interval {options['interval']} is not accepted: it must be from 0.1 to 3600 seconds."
            )
        queues = [registry.queues.find(name) for name in options["queue"]] or None
        pause = threading.Event()
        try:
            while True:
                self._show(queues, options["json"], options["watch"])
                if not options["watch"]:
                    return
                pause.wait(options["interval"])
        except KeyboardInterrupt:
            self.stdout.write("")

    def _show(self, queues: Any, as_json: bool, watch: bool) -> None:
        found = figures(queues)
        if as_json:
            self.stdout.write(json.dumps([one.as_dict() for one in found], indent=None if watch else 2))
            return
        if watch and self.stdout.isatty():
            self.stdout.write("\033[2J\033[H", ending="")
        head = ("queue", "waiting", "leased", "oldest", "delayed", "poison", "workers", "")
        lines = [head]
        for one in found:
            counts = [f"{n}+" if n >= LIMIT else str(n) for n in (one.waiting, one.leased, one.delayed, one.poison)]
            note = one.error or "; ".join(filter(None, ["paused" if one.paused else "", one.trouble]))
            lines.append(
                (
                    one.queue,
                    counts[0],
                    counts[1],
                    span(one.oldest_seconds),
                    counts[2],
                    counts[3],
                    str(one.subscribers),
                    note,
                )
            )
        widths = [max(len(line[i]) for line in lines) for i in range(len(head) - 1)]
        for line in lines:
            cells = [line[0].ljust(widths[0]), *(line[i].rjust(widths[i]) for i in range(1, len(widths)))]
            self.stdout.write("  ".join([*cells, line[-1]]).rstrip())
