"""Resolves the path of a task. Paths are read from a table and therefore untrusted: only modules of this project are
imported, and only tasks are returned.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import lru_cache
from importlib import import_module
from typing import Any

from django.conf import settings

from ...errors import UndecodableMessage
from .compat import Task
from .serialization import TaskHeaders


def is_allowed(module: str, others: Iterable[str]) -> bool:
    """Whether tasks may be in this module: one of a package of INSTALLED_APPS, of the settings, or of ``others``."""
    top = module.partition(".")[0]
    return top in _packages(tuple(settings.INSTALLED_APPS), str(settings.SETTINGS_MODULE or "")) or any(
        module == package or module.startswith(package + ".") for package in others
    )


@lru_cache(maxsize=8)
def _packages(apps: tuple[str, ...], settings_module: str) -> frozenset[str]:
    return frozenset(name.partition(".")[0] for name in (*apps, settings_module) if name)


def task_at(path: str, others: Iterable[str] = ()) -> Any:
    """The task with this path. Raises UndecodableMessage, which says why there is none."""
    name, _, attribute = path.rpartition(".")
    if not name or not all(part.isidentifier() for part in path.split(".")):
        raise UndecodableMessage(f"{path[:200]!r} is not the path of a task.")
    if name not in sys.modules and not is_allowed(name, others):
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


def restored(task_headers: TaskHeaders, others: Iterable[str] = ()) -> Any:
    """The task of a result, as it was enqueued. Nothing is validated, because a result may outlive its task; a task
    that does not exist any more is represented by a stand-in with its path."""
    known, cls, func = None, Task, None
    try:
        known = task_at(task_headers.path, others)
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
