"""From a path to its task. A path comes out of a table, so it is a stranger's: only a module of this project is imported for
it, and only a task is taken from there.
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
from .serialization import Said


def is_allowed(module: str, others: Iterable[str]) -> bool:
    """Whether tasks may be in this module: one of a package of INSTALLED_APPS, of the settings, or of ``others``."""
    top = module.partition(".")[0]
    return top in _packages(tuple(settings.INSTALLED_APPS), str(settings.SETTINGS_MODULE or "")) or any(
        module == one or module.startswith(one + ".") for one in others
    )


@lru_cache(maxsize=8)
def _packages(apps: tuple[str, ...], settings_module: str) -> frozenset[str]:
    return frozenset(one.partition(".")[0] for one in (*apps, settings_module) if one)


def task_at(path: str, others: Iterable[str] = ()) -> Any:
    """The task with this path. Raises UndecodableMessage, which says why there is none."""
    name, _, attribute = path.rpartition(".")
    if not name or not all(part.isidentifier() for part in path.split(".")):
        raise UndecodableMessage(f"{path[:200]!r} is not the path of a task.")
    if name not in sys.modules and not is_allowed(name, others):
        raise UndecodableMessage(
            f"The task {path[:200]!r} is in no package of INSTALLED_APPS; OPTIONS['modules'] names others."
        )
    try:
        # Also of one that is there: another thread may be half way through it, and this waits.
        module = import_module(name)
    except BaseException as error:  # a module that calls sys.exit() is no reason to end a worker
        raise UndecodableMessage(f"The module of the task {path[:200]!r} cannot be imported: {error!r}") from error
    found = getattr(module, attribute, None)
    if not isinstance(found, Task) or found.module_path != path:
        raise UndecodableMessage(f"{path[:200]!r} is no task in this version of the project.")
    return found


def restored(said: Said, others: Iterable[str] = ()) -> Any:
    """The task that a result is of, as it was enqueued. Nothing is validated: a result outlives what its task was, and one
    whose task is gone has a stand-in with its path."""
    known, cls, func = None, Task, None
    try:
        known = task_at(said.path, others)
        cls, func = type(known), known.func
    except UndecodableMessage:
        func = _stand_in(said.path)
    task: Any = object.__new__(cls)
    for name in cls.__dataclass_fields__:
        object.__setattr__(task, name, getattr(known, name, None))
    for name, value in (
        ("func", func), ("priority", said.priority), ("backend", said.backend), ("queue_name", said.queue_name),
        ("run_after", said.run_after), ("takes_context", bool(known and known.takes_context)),
    ):  # fmt: skip
        object.__setattr__(task, name, value)
    return task


def _stand_in(path: str) -> Callable[..., Any]:
    def gone(*args: Any, **kwargs: Any) -> Any:
        raise UndecodableMessage(f"There is no task {path[:200]!r} any more.")

    gone.__module__, _, gone.__qualname__ = path.rpartition(".")
    gone.__name__ = gone.__qualname__
    return gone
