"""Rejects malformed task messages: they name a task, and their headers or body are not what Celery writes.

Celery does not validate them and fails outside of its error handling: the worker exits, the message is delivered again
and ends the next worker, or the task is never started and never acked. Here such a message is refused on receipt and
becomes poison, with the reason.
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

#: Errors that a value of the wrong shape causes. Errors of the database, the network or the disk are not among them.
SHAPE_ERRORS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)

_SIMPLE = (str, int, float, type(None))
_MAX_REASON = 300


def task_error(headers: Mapping[str, Any], payload: Any) -> str:
    """Why a task cannot run; '' if it can. ``payload``: (args, kwargs, embed)."""
    args, kwargs, embed = payload
    if not isinstance(args, list | tuple):
        return f"the arguments are not a list: {args!r}"
    if not isinstance(kwargs, Mapping):
        return f"the keyword arguments are not a mapping: {kwargs!r}"
    for name, kind in _KINDS.items():
        value = headers.get(name)
        if value and not isinstance(value, kind):
            return f"the header {name!r} is {value!r}"
    if not _is_pair_of_numbers(headers.get("timelimit")):
        return f"the header 'timelimit' is not a pair of seconds: {headers['timelimit']!r}"
    if not all(isinstance(name, str) for name in headers.get("stamped_headers") or ()):
        return f"the header 'stamped_headers' is not a list of names: {headers['stamped_headers']!r}"
    if embed and not isinstance(embed, Mapping):
        return f"the third part of the body is not a mapping: {embed!r}"
    return _embed_error(embed or {})


#: Headers that Celery reads in the worker's main process -> their types, if they have a value.
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
    return all(limit is None or (isinstance(limit, int | float) and isfinite(limit)) for limit in value)


def _embed_error(embed: Mapping[str, Any]) -> str:
    for name in ("callbacks", "errbacks", "chain"):
        signatures = embed.get(name)
        if signatures and not (
            isinstance(signatures, list | tuple) and all(isinstance(signature, Mapping) for signature in signatures)
        ):
            return f"{name!r} in the body is not a list of signatures: {signatures!r}"
    chord = embed.get("chord")
    return f"'chord' in the body is not a signature: {chord!r}" if chord and not isinstance(chord, Mapping) else ""


def note_refusal(message: Delivered, why: str) -> str:
    """Set the reason of the message's poison record; returns it."""
    message.reason = in_one_line(f"The task cannot run: {why}", _MAX_REASON)
    return message.reason


class TolerantConsumerStep(bootsteps.StartStopStep):  # type: ignore[misc]
    """Celery bootstep: a message that the consumer fails at becomes poison, and the worker continues."""

    requires = (Tasks,)

    def start(self, c: Any) -> None:
        create, reject_invalid = type(c).create_task_handler, type(c).on_invalid_task

        def on_invalid_task(body: Any, message: Any, exc: Exception) -> Any:
            if isinstance(message, Delivered) and not message.reason and not message.decode_error():
                note_refusal(message, str(exc))
            return reject_invalid(c, body, message, exc)

        c.on_invalid_task = on_invalid_task
        c.create_task_handler = lambda *given, **named: _tolerant(create(c, *given, **named))


def _tolerant(handle: Any) -> Any:
    def on_task_received(message: Any) -> Any:
        try:
            return handle(message)
        except SHAPE_ERRORS as error:
            if not isinstance(message, Delivered):
                raise
            log.exception("Celery failed at message %s; the message becomes poison.", message.delivery_tag)
            if not message.acknowledged:
                note_refusal(message, f"{type(error).__name__}: {error}")
                message.reject(requeue=False)

    return on_task_received
