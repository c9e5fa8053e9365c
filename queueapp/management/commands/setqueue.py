"""``manage.py setqueue``: set options of a queue at run time, in place of the declared ones."""

from __future__ import annotations

from argparse import ArgumentParser
from datetime import timedelta
from typing import Any

from django.core.management.base import CommandError
from django.db import router
from django.utils.dateparse import parse_duration

from ... import overrides, registry
from ...errors import InvalidOption
from ...messages.escaping import in_one_line
from ...models import QueueControl
from ...operations import control
from ...sending.validation import alias_of
from ..base_command import OperatorCommand

#: The value that restores the declared option.
NONE = "none"


class Command(OperatorCommand):
    """Set, show and reset the options of a queue."""

    help = (
        "Set options of a queue without a deploy, within the bounds of their declaration; none: back to the declared "
        "value. Workers apply them within one peek delay, other processes that receive within some seconds. Without an "
        "option: show the present values."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("queue", help="Queue by label or table.")
        for name in control.settable_options():
            option = control.settable_option(name)
            kind = "DURATION" if option.kind is timedelta else "N"
            parser.add_argument(
                f"--{name.replace('_', '-')}", metavar=kind,
                help=f"{option.accepted}; or: {NONE}.".replace("%", "%%")
                + (" As a number of seconds, 00:00:30 or PT30S." if option.kind is timedelta else ""),
            )  # fmt: skip

    def handle(self, *args: Any, **options: Any) -> None:
        queue = registry.queues.find(options["queue"])
        given = {name: options[name] for name in control.settable_options() if options[name] is not None}
        # Check all values before the first is set.
        values = {name: _read(name, text) for name, text in given.items()}
        try:
            for name, value in values.items():
                control.check_override(queue, name, value)
        except InvalidOption as error:
            raise CommandError(str(error)) from error
        label = queue._meta.label
        for name, value in values.items():
            changed = control.set_option(queue, name, value)
            shown = "as declared" if value is None else value
            self.stdout.write(f"{label}: {name} is {shown}{'' if changed else ', as before'}.")
        if not values:
            alias = alias_of(queue)
            if router.allow_migrate_model(alias, QueueControl):
                overrides.reload(alias)  # raises if the values cannot be read
            for name in control.settable_options():
                found = overrides.effective_value(queue, name, alias)
                self.stdout.write(f"{label}: {name} is {'not set' if found is None else found}.")


def _read(name: str, text: str) -> Any:
    if text == NONE:
        return None
    shown = in_one_line(text, 40)
    option = control.settable_option(name)
    found: timedelta | int | None
    if option.kind is timedelta:
        try:
            # A bare number is a number of seconds, as everywhere on the command line.
            found = timedelta(seconds=float(text)) if _is_number(text) else parse_duration(text)
        except (ValueError, OverflowError):
            found = None
    else:
        found = int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else None
    if found is None:
        raise CommandError(f"{name} {shown!r} is not accepted: it must be {option.accepted}, or: {NONE}.")
    return found


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdecimal() and text.isascii()
