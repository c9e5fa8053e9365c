"""A task as a message: its path is the message's type, what else must survive is in headers, the arguments are the body."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from django.utils.dateparse import parse_datetime

from ... import messages
from ...errors import UndecodableMessage
from ...failures.history import clean
from .compat import DEFAULT_TASK_BACKEND_ALIAS, DEFAULT_TASK_QUEUE_NAME

QUEUE, BACKEND, PRIORITY, RUN_AFTER = "task-queue", "task-backend", "task-priority", "task-run-after"


def headers_of(task: Any, backend: str) -> dict[str, str]:
    """The headers of a task's message; most tasks of one path have the same."""
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
    """The arguments, normalized, as they are stored: ASCII, so that every database takes it, and any driver."""
    return json.dumps({"args": args, "kwargs": kwargs}, separators=(",", ":")).encode()


def arguments_of(body: bytes | None) -> tuple[list[Any], dict[str, Any]]:
    """The reverse of ``body_of``. Raises UndecodableMessage."""
    try:
        found = json.loads(body or b"")
        args, kwargs = found["args"], found["kwargs"]
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise UndecodableMessage(f"The body holds no arguments of a task: {error!r}") from error
    if not isinstance(args, list) or not isinstance(kwargs, dict):
        raise UndecodableMessage("The body holds no arguments of a task: no list and object.")
    return args, kwargs


class Said:
    """What a message's headers say of its task, as the columns of a result take it: anybody may have written them. What
    makes no sense there is left to its default."""

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
    def by(cls, headers: str) -> Said:
        """By stored headers, whatever they are."""
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
    """The message's id that a result's id is; None for what is none."""
    try:
        return uuid.UUID(result_id) if isinstance(result_id, str) and len(result_id) <= 45 else None
    except ValueError:
        return None
