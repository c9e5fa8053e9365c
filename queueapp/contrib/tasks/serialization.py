"""Converts tasks to messages: the path is the message type, the arguments are the body, all other data are headers."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any

from django.utils.dateparse import parse_datetime

from ... import messages
from ...errors import InvalidMessage, UndecodableMessage
from ...failures.history import clean
from ...messages.bodies import decode_body, refuse_not_finite
from ...messages.body_filters import is_wrapped, opened
from ...messages.headers import read_kind
from .compat import DEFAULT_TASK_BACKEND_ALIAS, DEFAULT_TASK_QUEUE_NAME

QUEUE, BACKEND, PRIORITY, RUN_AFTER = "task-queue", "task-backend", "task-priority", "task-run-after"


def headers_of(task: Any, backend: str) -> dict[str, str]:
    """The headers of a task's message; most messages of one task have equal ones."""
    headers = {messages.TYPE: task.module_path, messages.CONTENT_TYPE: messages.JSON}
    if task.queue_name != DEFAULT_TASK_QUEUE_NAME:
        headers[QUEUE] = task.queue_name
    if backend != DEFAULT_TASK_BACKEND_ALIAS:
        headers[BACKEND] = backend
    if task.priority:
        headers[PRIORITY] = str(task.priority)
    if task.run_after is not None:
        headers[RUN_AFTER] = task.run_after.isoformat()
    return headers


def body_of(args: Any, kwargs: Any) -> bytes:
    """The arguments, normalized, as JSON in ASCII, which every database and driver accepts. Raises InvalidMessage for
    NaN and the infinities, which JSON does not have."""
    arguments = {"args": args, "kwargs": kwargs}
    try:
        return json.dumps(arguments, separators=(",", ":"), allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        with suppress(TypeError, RecursionError):
            refuse_not_finite(arguments)
        raise InvalidMessage(f"The arguments of a task cannot be a message body: {error}.") from error


def arguments_of(body: bytes | None) -> tuple[list[Any], dict[str, Any]]:
    """The reverse of ``body_of``. Raises UndecodableMessage."""
    try:
        return _checked(json.loads(body or b""))
    except (ValueError, RecursionError) as error:
        raise UndecodableMessage(f"The body has no task arguments: {error!r}") from error


def _checked(value: Any) -> tuple[list[Any], dict[str, Any]]:
    try:
        args, kwargs = value["args"], value["kwargs"]
    except (TypeError, LookupError) as error:
        raise UndecodableMessage(f"The body has no task arguments: {error!r}") from error
    if not isinstance(args, list) or not isinstance(kwargs, dict):
        raise UndecodableMessage("The body has no task arguments: not a list and an object.")
    return args, kwargs


def stored_arguments(
    body: bytes | None, headers: str, identity: uuid.UUID, alias: str
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a message as it is stored: compressed, encrypted or in another codec than JSON. Raises
    UndecodableMessage, ErasedMessage and KeyMissing."""
    content_type = read_kind(headers).content_type
    if is_wrapped(content_type):
        body, content_type = opened(body, content_type, messages.decode_headers(headers), identity, alias)
    if content_type in ("", messages.JSON):
        return arguments_of(body)  # as a worker reads them: lone surrogates are accepted
    return _checked(decode_body(body, content_type))


class TaskHeaders:
    """The task data of a message's headers, bounded for the columns of a result. Headers are untrusted; an invalid
    value is replaced by its default."""

    __slots__ = ("backend", "path", "priority", "queue_name", "run_after")

    def __init__(self, headers: Mapping[str, str]) -> None:
        self.path = clean(headers.get(messages.TYPE, ""), 500)
        self.queue_name = clean(headers.get(QUEUE, DEFAULT_TASK_QUEUE_NAME), 200)
        self.backend = clean(headers.get(BACKEND, DEFAULT_TASK_BACKEND_ALIAS), 200)
        try:
            self.priority = int(headers.get(PRIORITY, "0")[:5])
        except ValueError:
            self.priority = 0
        self.run_after = _time(headers.get(RUN_AFTER))

    @classmethod
    def by(cls, headers: str) -> TaskHeaders:
        """From stored headers; unreadable ones give the defaults."""
        try:
            return cls(messages.decode_headers(headers))
        except UndecodableMessage:
            return cls({})


def _time(text: str | None) -> datetime | None:
    try:
        return parse_datetime(text) if text else None
    except ValueError:
        return None


def id_of(result_id: Any) -> uuid.UUID | None:
    """The message id of a result id; None if it is not one."""
    try:
        return uuid.UUID(result_id) if isinstance(result_id, str) and len(result_id) <= 45 else None
    except ValueError:
        return None
