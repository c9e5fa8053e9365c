"""The operations on a whole queue: pause, resume, change its concurrency or its limits, purge.

    button --POST--> confirm page (explanation, options) --POST--> done, logged under the queue --> overview

Each operation asks for confirmation: all of them affect every worker, and a button is easily hit by accident.
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
from ..operations import bulk_operations, control
from ..operations.selections import Source
from ..sending.validation import alias_of
from .formatting import display
from .operations import Options
from .overview_rows import row_of

#: The message for the user: its text and its level.
Notice = tuple[str, int]


class Concurrency(Options):
    """How many receivers each worker process has for the queue."""

    receivers = forms.IntegerField(
        required=False,
        min_value=1,
        max_value=MAX_CONCURRENCY,
        label="Receivers of each worker process",
        help_text=f"From 1 to {MAX_CONCURRENCY}. Empty: as many as the worker was started with.",
    )


@dataclass(frozen=True)
class QueueOperation:
    """One operation on a queue. ``title`` may query the queue; ``run`` gets the cleaned options."""

    name: str
    label: str
    title: Callable[[Any], str]
    explanation: str
    run: Callable[[Any, Any, dict[str, Any]], Notice]
    options: type[Options] = Options
    #: The form, where it differs from queue to queue.
    options_of: Callable[[Any], type[Options]] | None = None
    initial: Callable[[Any], dict[str, Any]] = lambda queue: {}
    #: The button of the confirm page; "": label and queue.
    answer: str = ""
    dangerous: bool = False


def _pause(queue: Any, user: Any, options: dict[str, Any]) -> Notice:
    changed = control.pause(queue, by=user)
    return f"Queue {queue._meta.label} {'is paused' if changed else 'was paused already'}.", messages.INFO


def _resume(queue: Any, user: Any, options: dict[str, Any]) -> Notice:
    changed = control.resume(queue, by=user)
    return f"Queue {queue._meta.label} {'is running again' if changed else 'was not paused'}.", messages.INFO


def _set_concurrency(queue: Any, user: Any, options: dict[str, Any]) -> Notice:
    receivers = options["receivers"]
    changed = control.set_concurrency(queue, receivers, by=user)
    shown = "as many receivers as it was started with" if receivers is None else display.receivers(receivers)
    return (
        f"Queue {queue._meta.label}: each worker process has {shown}{'' if changed else ', as before'}.",
        messages.INFO,
    )


def _limits_of(queue: Any) -> type[Options]:
    """The form of the options that can be set at run time, each with the bounds of its declaration."""
    fields: dict[str, Any] = {}
    for name in control.settable_options():
        option, declared = control.settable_option(name), getattr(queue.delivery, name)
        settable = (
            queue.delivery.expires_by_age if name == "expiration" else declared is not None or name == "lease_period"
        )
        if not settable:
            continue  # setting it would be refused
        shown = display.in_full(declared) if isinstance(declared, timedelta) else declared or "none"
        about: dict[str, Any] = {
            "required": False,
            "show_hidden_initial": True,
            "label": name.replace("_", " ").capitalize(),
            "help_text": f"{option.accepted.removesuffix(', or None').capitalize()}. Empty: as declared, {shown}.",
        }
        if option.kind is timedelta:
            bounds = f"from {display.in_full(option.low)} to {display.in_full(option.high)}"
            about["help_text"] = f"Days, then hours:minutes:seconds; {bounds}. Empty: as declared, {shown}."
            about["error_messages"] = {"invalid": "Write it as 0:05:00, or 1 0:00:00 with days."}
            fields[name] = forms.DurationField(**about)
        else:
            fields[name] = forms.IntegerField(min_value=option.low, max_value=option.high, **about)

    def clean(self: Options) -> dict[str, Any]:
        found: dict[str, Any] = Options.clean(self) or {}
        for name, given in list(found.items()):
            if self.add_initial_prefix(name) in self.data and name not in self.changed_data:
                del found[name]  # unchanged in this form: do not undo what another operator set meanwhile
                continue
            try:
                control.check_override(queue, name, given)
            except InvalidOption as error:
                self.add_error(name, str(error))
        return found

    return type("Limits", (Options,), fields | {"clean": clean})


def _set_limits(queue: Any, user: Any, options: dict[str, Any]) -> Notice:
    changed = [name for name, value in options.items() if control.set_option(queue, name, value, by=user)]
    shown = ", ".join(name.replace("_", " ") for name in changed)
    return f"Queue {queue._meta.label}: {f'{shown} changed' if changed else 'nothing changed'}.", messages.INFO


def _limits(queue: Any) -> dict[str, Any]:
    rows = QueueControl.objects.using(alias_of(queue)).filter(queue=queue._meta.label)
    return rows.values(*control.settable_options()).first() or {}


def _purge(queue: Any, user: Any, options: dict[str, Any]) -> Notice:
    """One batch at once; the rest, if there is more, in the background."""
    purged = control.purge(queue, by=user, within=timedelta(0))
    text = f"{display.messages(purged.deleted)} of {queue._meta.label} deleted."
    if not purged.complete:
        rest = bulk_operations.start(Source(queue, alias_of(queue)), "delete_selected", by=user)
        text += f" {str(rest).capitalize()} deletes the rest in the background."
    return text, messages.SUCCESS


def _waiting(queue: Any) -> str:
    waiting = row_of(queue).waiting
    return f"{waiting} waiting message{'' if waiting == '1' else 's'}"


def _concurrency(queue: Any) -> dict[str, Any]:
    rows = QueueControl.objects.using(alias_of(queue)).filter(queue=queue._meta.label)
    return {"receivers": rows.values_list("concurrency", flat=True).first()}


OPERATIONS = {
    operation.name: operation
    for operation in (
        QueueOperation(
            "pause",
            "Pause",
            lambda queue: f"Pause {queue._meta.label}?",
            "Workers stop receiving from this queue within a peek delay. Messages in flight are handled to their end, "
            "and sending goes on, so the queue grows until it is resumed.",
            _pause,
        ),
        QueueOperation(
            "resume",
            "Resume",
            lambda queue: f"Resume {queue._meta.label} ({_waiting(queue)})?",
            "Workers receive from this queue again.",
            _resume,
        ),
        QueueOperation(
            "concurrency",
            "Concurrency",
            lambda queue: f"Change the concurrency of {queue._meta.label}?",
            "The number of messages of this queue that each worker process handles at once, in place of the number "
            "that it was started with. Workers apply it within a peek delay, without a restart; a receiver above the "
            "number stops after its current message. A process has at most 32 receivers for a queue, or as many as it "
            "was started with.",
            _set_concurrency,
            options=Concurrency,
            initial=_concurrency,
            answer="Set concurrency",
        ),
        QueueOperation(
            "limits",
            "Limits",
            lambda queue: f"Change the limits of {queue._meta.label}?",
            "Sets options in place of those that the queue declares, without a deploy. Workers apply them within a "
            "peek delay, other processes that receive within some seconds; a running lease keeps its period.",
            _set_limits,
            options_of=_limits_of,
            initial=_limits,
            answer="Set limits",
        ),
        QueueOperation(
            "purge",
            "Purge",
            lambda queue: f"Purge {queue._meta.label} ({_waiting(queue)})?",
            "Every waiting message is deleted for good and will not be handled. Messages that are leased or locked by "
            "a receiver are left alone. Delayed and poison messages stay.",
            _purge,
            dangerous=True,
        ),
    )
}
