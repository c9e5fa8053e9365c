"""What no worker can run: a message that names a task, and whose headers or body are not what Celery writes.

Celery takes them as they come, and fails at them where nobody catches it: the worker ends, the message comes again, and ends the
next one. Or the task is never begun and never acked. Here such a message is refused before, and kept as poison with what is wrong.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from math import isfinite
from typing import Any

from celery import bootsteps
from celery.worker.consumer.tasks import Tasks

from ...messages.escaping import in_one_line
from .qos import Delivered

log = logging.getLogger("queueapp")

#: What code raises that was given something else than it expects. An error of the database, of a network or of a disk is none.
SHAPE_ERRORS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)

_SIMPLE = (str, int, float, type(None))
_LONGEST = 300


def what_is_wrong(headers: Mapping[str, Any], payload: Any) -> str:
    """Why a task cannot be run; '': it can. ``payload``: (args, kwargs, what comes after the task)."""
    args, kwargs, embed = payload
    if not isinstance(args, list | tuple):
        return f"its arguments are no list: {args!r}"
    if not isinstance(kwargs, Mapping):
        return f"its keyword arguments are no mapping: {kwargs!r}"
    for name, kind in _KINDS.items():
        value = headers.get(name)
        if value and not isinstance(value, kind):
            return f"its header {name!r} is {value!r}"
    if not _is_pair_of_numbers(headers.get("timelimit")):
        return f"its header 'timelimit' is no pair of seconds: {headers['timelimit']!r}"
    if not all(isinstance(one, str) for one in headers.get("stamped_headers") or ()):
        return f"its header 'stamped_headers' is no list of names: {headers['stamped_headers']!r}"
    if embed and not isinstance(embed, Mapping):
        return f"what comes after it is no mapping: {embed!r}"
    return _wrong_after(embed or {})


#: Headers that Celery reads in the worker's main process -> what they have to be, where they say anything.
_KINDS: dict[str, type | tuple[type, ...]] = {
    "id": _SIMPLE,
    "root_id": _SIMPLE,
    "parent_id": _SIMPLE,
    "group": _SIMPLE,
    "shadow": str,
    "retries": int,
    "stamped_headers": (list, tuple),
    "stamps": Mapping,
}


def _is_pair_of_numbers(value: Any) -> bool:
    if not value:
        return True
    if not isinstance(value, list | tuple) or len(value) != 2:
        return False
    return all(one is None or (isinstance(one, int | float) and isfinite(one)) for one in value)


def _wrong_after(embed: Mapping[str, Any]) -> str:
    for name in ("callbacks", "errbacks", "chain"):
        some = embed.get(name)
        if some and not (isinstance(some, list | tuple) and all(isinstance(one, Mapping) for one in some)):
            return f"{name!r} in its body is no list of signatures: {some!r}"
    chord = embed.get("chord")
    return f"'chord' in its body is no signature: {chord!r}" if chord and not isinstance(chord, Mapping) else ""


def refused(message: Delivered, why: str) -> str:
    """Note why a message is not run, for the poison page; what was noted."""
    message.reason = in_one_line(f"This is no task that can be run: {why}", _LONGEST)
    return message.reason


class TolerantConsumerStep(bootsteps.StartStopStep):  # type: ignore[misc]
    """A step of Celery's consumer: a message that it fails at ends no worker."""

    requires = (Tasks,)

    def start(self, c: Any) -> None:
        made, invalid = type(c).create_task_handler, type(c).on_invalid_task

        def on_invalid_task(body: Any, message: Any, exc: Exception) -> Any:
            if isinstance(message, Delivered) and not message.reason and not message.why_not_decoded():
                refused(message, str(exc))
            return invalid(c, body, message, exc)

        c.on_invalid_task = on_invalid_task
        c.create_task_handler = lambda *given, **named: _tolerant(made(c, *given, **named))


def _tolerant(handle: Any) -> Any:
    def on_task_received(message: Any) -> Any:
        try:
            return handle(message)
        except SHAPE_ERRORS as error:
            if not isinstance(message, Delivered):
                raise
            log.exception("Celery has failed at the message %s.", message.delivery_tag)
            if not message.acknowledged:
                refused(message, f"{type(error).__name__}: {error}")
                message.reject(requeue=False)

    return on_task_received
