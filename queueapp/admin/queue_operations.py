"""What is done to a whole queue from the overview: pause, resume, change its concurrency, purge.

    button --POST--> confirm page (what it means, options) --POST--> done, logged under the queue --> overview

Each asks first: a button is easily hit, on a telephone more than elsewhere, and all of them are felt by every worker.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django import forms
from django.contrib import messages

from ..conf import MAX_CONCURRENCY
from ..errors import InvalidOption
from ..models import QueueControl
from ..operations import control
from ..sending.validation import alias_of
from .formatting import display
from .operations import Options
from .overview_rows import of_queue

#: What is told to the user: the text, and the level of the message.
Told = tuple[str, int]


class Concurrency(Options):
    """How many tasks of each worker process receive the queue."""

    tasks = forms.IntegerField(
        required=False,
        min_value=1,
        max_value=MAX_CONCURRENCY,
        label="Tasks of each worker process",
        help_text=f"From 1 to {MAX_CONCURRENCY}. Empty: as many as the worker was started with.",
    )


@dataclass(frozen=True)
class QueueOperation:
    """One thing that can be done to a queue. ``title`` may look at the queue; ``run`` gets the cleaned options."""

    name: str
    label: str
    title: Callable[[Any], str]
    explanation: str
    run: Callable[[Any, Any, dict[str, Any]], Told]
    options: type[Options] = Options
    #: For options that differ from queue to queue.
    options_of: Callable[[Any], type[Options]] | None = None
    initial: Callable[[Any], dict[str, Any]] = lambda queue: {}
    #: What the button of the confirm page says; "": label and queue.
    answer: str = ""
    dangerous: bool = False


def _pause(queue: Any, user: Any, options: dict[str, Any]) -> Told:
    changed = control.pause(queue, by=user)
    return f"Queue {queue._meta.label} {'is paused' if changed else 'was paused already'}.", messages.INFO


def _resume(queue: Any, user: Any, options: dict[str, Any]) -> Told:
    changed = control.resume(queue, by=user)
    return f"Queue {queue._meta.label} {'is running again' if changed else 'was not paused'}.", messages.INFO


def _set_concurrency(queue: Any, user: Any, options: dict[str, Any]) -> Told:
    tasks = options["tasks"]
    changed = control.set_concurrency(queue, tasks, by=user)
    said = "as many tasks as it was started with" if tasks is None else display.tasks(tasks)
    return (
        f"Queue {queue._meta.label}: each worker process has {said}{'' if changed else ', as before'}.",
        messages.INFO,
    )


def _limits_of(queue: Any) -> type[Options]:
    """The form of what can be set at run time: a field for each option, with the bounds of its declaration."""
    fields: dict[str, Any] = {}
    for name in control.settable_options():
        option, declared = control.settable_option(name), getattr(queue.delivery, name)
        made_for_it = (
            queue.delivery.expires_by_age if name == "expiration" else declared is not None or name == "lease_period"
        )
        if not made_for_it:
            continue  # it would be refused
        said = display.in_full(declared) if isinstance(declared, timedelta) else declared or "none"
        about: dict[str, Any] = {
            "required": False,
            "show_hidden_initial": True,
            "label": name.replace("_", " ").capitalize(),
            "help_text": f"{option.accepted.removesuffix(', or None').capitalize()}. Empty: as declared, {said}.",
        }
        if option.kind is timedelta:
            bounds = f"from {display.in_full(option.low)} to {display.in_full(option.high)}"
            about["help_text"] = f"Days, then hours:minutes:seconds; {bounds}. Empty: as declared, {said}."
            about["error_messages"] = {"invalid": "Write it as 0:05:00, or 1 0:00:00 with days."}
            fields[name] = forms.DurationField(**about)
        else:
            fields[name] = forms.IntegerField(min_value=option.low, max_value=option.high, **about)

    def clean(self: Options) -> dict[str, Any]:
        found: dict[str, Any] = Options.clean(self) or {}
        for name, given in list(found.items()):
            if self.add_initial_prefix(name) in self.data and name not in self.changed_data:
                del found[name]  # as it was shown: what somebody else has set meanwhile is not to be undone
                continue
            try:
                control.check_override(queue, name, given)
            except InvalidOption as error:
                self.add_error(name, str(error))
        return found

    return type("Limits", (Options,), fields | {"clean": clean})


def _set_limits(queue: Any, user: Any, options: dict[str, Any]) -> Told:
    changed = [name for name, value in options.items() if control.set_option(queue, name, value, by=user)]
    said = ", ".join(name.replace("_", " ") for name in changed)
    return f"Queue {queue._meta.label}: {f'{said} changed' if changed else 'nothing changed'}.", messages.INFO


def _limits(queue: Any) -> dict[str, Any]:
    rows = QueueControl.objects.using(alias_of(queue)).filter(queue=queue._meta.label)
    return rows.values(*control.settable_options()).first() or {}


def _purge(queue: Any, user: Any, options: dict[str, Any]) -> Told:
    purged = control.purge(queue, by=user)
    text = f"{display.messages(purged.deleted)} of {queue._meta.label} deleted."
    if purged.complete:
        return text, messages.SUCCESS
    more = f" Stopped after {control.PURGE_FOR.seconds} seconds; there are more: purge again for the rest."
    return text + more, messages.WARNING


def _waiting(queue: Any) -> str:
    waiting = of_queue(queue).waiting
    return f"{waiting} waiting message{'' if waiting == '1' else 's'}"


def _concurrency(queue: Any) -> dict[str, Any]:
    rows = QueueControl.objects.using(alias_of(queue)).filter(queue=queue._meta.label)
    return {"tasks": rows.values_list("concurrency", flat=True).first()}


OPERATIONS = {
    operation.name: operation
    for operation in (
        QueueOperation(
            "pause",
            "Pause",
            lambda queue: f"Pause {queue._meta.label}?",
            "Within a peek delay no worker takes messages from this queue any more. What they hold is handled to its end, "
            "and sending goes on, so the queue grows until it is resumed.",
            _pause,
        ),
        QueueOperation(
            "resume",
            "Resume",
            lambda queue: f"Resume {queue._meta.label} ({_waiting(queue)})?",
            "Workers take messages from this queue again.",
            _resume,
        ),
        QueueOperation(
            "concurrency",
            "Concurrency",
            lambda queue: f"Change the concurrency of {queue._meta.label}?",
            "How many messages of this queue each worker process handles at once, whatever it was started with. Seen within "
            "a peek delay, without a restart; tasks above it end with the message that they have in hand. A process has "
            "room for 32 tasks of a queue, or for as many as it was started with.",
            _set_concurrency,
            options=Concurrency,
            initial=_concurrency,
            answer="Set concurrency",
        ),
        QueueOperation(
            "limits",
            "Limits",
            lambda queue: f"Change the limits of {queue._meta.label}?",
            "Sets options in place of what the queue declares, without a deploy. Workers see it within a peek delay, other "
            "processes that receive within some seconds; what is leased by then keeps its lease.",
            _set_limits,
            options_of=_limits_of,
            initial=_limits,
            answer="Set limits",
        ),
        QueueOperation(
            "purge",
            "Purge",
            lambda queue: f"Purge {queue._meta.label} ({_waiting(queue)})?",
            "Every waiting message is deleted for good and will not be handled. Messages that are leased or just being "
            "received are left alone. Delayed and poison messages stay.",
            _purge,
            dangerous=True,
        ),
    )
}
