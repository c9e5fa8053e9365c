"""Converts tasks to messages and back: the path is the message type, the arguments are the body, the rest headers."""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from importlib import import_module
from typing import Any

from django.conf import settings
from django.utils.dateparse import parse_datetime

from ... import messages
from ...errors import InvalidMessage, UndecodableMessage
from ...failures.history import clean
from ...messages.bodies import decode_body, refuse_not_finite
from ...messages.body_filters import is_wrapped, opened
from ...messages.headers import read_kind
from .compat import DEFAULT_TASK_BACKEND_ALIAS, DEFAULT_TASK_QUEUE_NAME, Task

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


# -- resolving the path of a task --------------------------------------------------------------------------------------
#
# Paths are read from a table and therefore untrusted: only modules of this project are
# imported, and only tasks are returned.


def is_allowed(module: str, modules: Iterable[str]) -> bool:
    """Whether tasks may be in this module: one of a package of INSTALLED_APPS, of the settings, or of ``modules``."""
    top = module.partition(".")[0]
    return top in _packages(tuple(settings.INSTALLED_APPS), str(settings.SETTINGS_MODULE or "")) or any(
        module == package or module.startswith(package + ".") for package in modules
    )


@lru_cache(maxsize=8)
def _packages(apps: tuple[str, ...], settings_module: str) -> frozenset[str]:
    return frozenset(name.partition(".")[0] for name in (*apps, settings_module) if name)


def task_at(path: str, modules: Iterable[str] = ()) -> Any:
    """The task with this path. Raises UndecodableMessage, which says why there is none."""
    name, _, attribute = path.rpartition(".")
    if not name or not all(part.isidentifier() for part in path.split(".")):
        raise UndecodableMessage(f"{path[:200]!r} is not the path of a task.")
    if name not in sys.modules and not is_allowed(name, modules):
        raise UndecodableMessage(
            f"The task {path[:200]!r} is not in a package of INSTALLED_APPS or of OPTIONS['modules']."
        )
    try:
        # Also if it is in sys.modules: another thread may be importing it, and this call waits for that.
        module = import_module(name)
    except BaseException as error:  # a module that calls sys.exit() must not end the worker
        raise UndecodableMessage(f"The module of the task {path[:200]!r} cannot be imported: {error!r}") from error
    found = getattr(module, attribute, None)
    if not isinstance(found, Task) or found.module_path != path:
        raise UndecodableMessage(f"{path[:200]!r} is not a task in this version of the project.")
    return found


def restored(task_headers: TaskHeaders, modules: Iterable[str] = ()) -> Any:
    """The task of a result, as it was enqueued. Nothing is validated, because a result may outlive its task; a task
    that does not exist any more is represented by a stand-in with its path."""
    known, cls, func = None, Task, None
    try:
        known = task_at(task_headers.path, modules)
        cls, func = type(known), known.func
    except UndecodableMessage:
        func = _stand_in(task_headers.path)
    task: Any = object.__new__(cls)
    for name in cls.__dataclass_fields__:
        object.__setattr__(task, name, getattr(known, name, None))
    for name, value in (
        ("func", func), ("priority", task_headers.priority), ("backend", task_headers.backend),
        ("queue_name", task_headers.queue_name),
        ("run_after", task_headers.run_after), ("takes_context", bool(known and known.takes_context)),
    ):  # fmt: skip
        object.__setattr__(task, name, value)
    return task


def _stand_in(path: str) -> Callable[..., Any]:
    def gone(*args: Any, **kwargs: Any) -> Any:
        raise UndecodableMessage(f"The task {path[:200]!r} does not exist any more.")

    gone.__module__, _, gone.__qualname__ = path.rpartition(".")
    gone.__name__ = gone.__qualname__
    return gone
