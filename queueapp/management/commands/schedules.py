"""``manage.py schedules``: the schedules, what is wrong with them, and operations on them."""

from __future__ import annotations

from argparse import ArgumentParser
from datetime import datetime
from typing import Any

from django.core.management.base import CommandError
from django.db import connections, router

from ... import registry
from ...messages.escaping import in_one_line
from ...models import Schedule
from ...schedules import declarations, stored
from ...schedules.timing import next_times
from ..base_command import OperatorCommand, counted


class Command(OperatorCommand):
    """List, check, pause, resume and run schedules."""

    help = (
        "List the schedules with their next times. --check exits with 1 if one cannot run, is late, or is declared in "
        "the code and missing from the database. What is declared is written by the dispatcher, not by this command."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("names", nargs="*", metavar="NAME", help="Only these schedules.")
        parser.add_argument("--tag", help="Only schedules with this tag.")
        parser.add_argument("--next", type=int, default=1, metavar="N", help="Show so many next times of each.")
        what = parser.add_mutually_exclusive_group()
        what.add_argument("--check", action="store_true", help="Show only what is wrong; exit with 1 if something is.")
        what.add_argument("--pause", action="store_true", help="Pause the named schedules.")
        what.add_argument("--resume", action="store_true", help="Resume the named schedules.")
        what.add_argument("--run", action="store_true", help="Send one message of each named schedule at once.")
        parser.add_argument("--json", action="store_true", help="Machine-readable output.")

    def handle(self, *args: Any, **options: Any) -> None:
        rows = self._rows(options["names"], options["tag"])
        if missing := sorted(set(options["names"]) - {row.name for _, row in rows}):
            raise CommandError(f"There is no schedule {missing[0]!r}.")
        for operation in ("pause", "resume", "run"):
            if options[operation]:
                if not options["names"] and not options["tag"]:
                    raise CommandError(f"--{operation} needs the names of schedules, or --tag.")
                self._operate(operation, rows, options["json"])
                return
        found = [self._facts(alias, row, max(0, options["next"])) for alias, row in rows]
        if options["check"]:
            found = [item for item in found if item["problem"]]
            if not options["names"] and not options["tag"]:
                found += self._undeclared({row.name for _, row in rows})
        if options["json"]:
            self.write_json(found, indent=2)
        else:
            for message in found:
                self.stdout.write(_line(message, options["check"]))
            if not found:
                self.stdout.write("No problems." if options["check"] else "No schedules.")
        if options["check"] and found:
            raise CommandError(f"{counted(len(found), 'schedule')} cannot run as declared.")

    def _rows(self, names: list[str], tag: str | None) -> list[tuple[str, Schedule]]:
        found = []
        for alias in sorted({router.db_for_write(queue) for queue in registry.queues}):
            rows = Schedule.objects.using(alias).order_by("name")
            if names:
                rows = rows.filter(name__in=names)
            found += [(alias, row) for row in rows if tag is None or tag in row.tags.split(",")]
        return found

    def _facts(self, alias: str, row: Schedule, count: int) -> dict[str, Any]:
        now = stored.clock(connections[alias])
        problem = stored.problem_of(row)
        if not problem and not row.paused and row.due_at is not None and now - row.due_at > row.misfire_grace:
            problem = f"late: it was due at {row.due_at.isoformat()}; does a dispatcher run?"
        times: list[datetime] = []
        if row.next_at is not None and not problem.startswith("InvalidOption"):
            times = [row.next_at, *next_times(stored.timing_of(row), row.next_at, count - 1)][:count]
        when = row.cron or (f"every {row.every}" if row.every is not None else row.at and row.at.isoformat())
        return {
            "name": row.name, "database": alias, "queue": row.queue, "task": row.task or None,
            "when": when, "timezone": row.timezone or None, "tags": row.tags.split(",") if row.tags else [],
            "paused": row.paused, "source": "code" if row.declared else "admin", "runs": row.runs,
            "last": row.last_at.isoformat() if row.last_at else None,
            "next": [time.isoformat() for time in times], "problem": problem or None,
        }  # fmt: skip

    def _undeclared(self, known: set[str]) -> list[dict[str, Any]]:
        missing = sorted(declarations.declared.keys() - known)
        text = "declared in the code, and not in the database; does a dispatcher run?"
        return [{"name": name, "problem": text} for name in missing]

    def _operate(self, operation: str, rows: list[tuple[str, Schedule]], as_json: bool) -> None:
        changed = 0
        for alias, row in rows:
            if operation == "run":
                changed += stored.run_now(alias, row.name) is not None
            else:
                changed += getattr(stored, operation)(alias, [row.name])
        if as_json:
            self.write_json({operation: changed})
            return
        done = {"pause": "paused", "resume": "resumed", "run": "run"}[operation]
        self.stdout.write(f"{counted(changed, 'schedule')} {done}.")


def _line(facts: dict[str, Any], check: bool) -> str:
    if check:
        return f"{facts['name']}: {in_one_line(facts['problem'], 500)}"
    state = "paused" if facts["paused"] else ", ".join(facts["next"]) or "over"
    line = f"{facts['name']}: {facts['when']} {facts['timezone'] or ''}".rstrip()
    line += f" -> {facts['task'] or facts['queue']}; next: {state}; runs: {facts['runs']}"
    return in_one_line(line + (f"; {facts['problem']}" if facts["problem"] else ""), 1000)
