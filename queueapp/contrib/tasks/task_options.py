"""The ``OPTIONS`` of a backend in ``TASKS``, and the mapping of task priorities to the levels of a queue."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from ...failures.recoverability import OPTIONS as RECOVERABILITY
from ...options import Option, read_all

#: The default queue.
OWN_QUEUE = "queueapp_tasks.TaskQueue"
#: Recipient of all tasks if QUEUES is empty, so that any queue name is accepted.
ANY = "tasks"


def _are_names(value: Any) -> bool:
    return all(isinstance(name, str) and name for name in value)


OPTIONS: tuple[Option, ...] = (
    Option("queue", str, OWN_QUEUE, "Label (app.Model) of the queue of its tasks."),
    Option(
        "enqueue_on_commit",
        str,
        None,
        "True: a task is stored after the commit of the open transaction in the queue's database. An alias of "
        "DATABASES: after the "
        "commit in that database. None or False: at once.",
        optional=True,
    ),
    Option(
        "retention",
        timedelta,
        timedelta(days=7),
        "How long results are stored after the end of their task; None: for ever; 0: not at all, and get_result() is "
        "refused.",
        low=timedelta(0),
        high=timedelta(days=36500),
        optional=True,
    ),
    Option(
        "work",
        list,
        None,
        "The queue names that workers with these settings consume; None: all of QUEUES.",
        optional=True,
        accept=_are_names,
    ),
    Option(
        "modules",
        list,
        [],
        "Packages besides INSTALLED_APPS that workers import tasks from.",
        accept=_are_names,
    ),
    *RECOVERABILITY,
)


class BackendOptions:
    """The options of one backend, as attributes. Raises InvalidOption."""

    queue: str
    enqueue_on_commit: str | None  #: '': of the queue's own database
    retention: timedelta | None
    work: list[str] | None
    modules: list[str]

    def __init__(self, alias: str, given: Mapping[str, Any]) -> None:
        where = f"TASKS[{alias!r}]['OPTIONS']: "
        given = {name: _plain(name, value) for name, value in given.items()}
        self.__dict__.update(read_all(OPTIONS, given, where))
        #: The defaults of tasks without options of their own.
        self.recoverability = {option.name: given[option.name] for option in RECOVERABILITY if option.name in given}

    @property
    def keeps_results(self) -> bool:
        """Whether the results of successful tasks are stored."""
        return self.retention is None or self.retention > timedelta(0)


def _plain(name: str, value: Any) -> Any:
    if name == "enqueue_on_commit" and isinstance(value, bool):
        return "" if value else None
    return list(value) if name in ("work", "modules") and isinstance(value, tuple | set) else value


def level_of(priority: int, levels: int) -> int:
    """The level of a queue for a task's priority, -100 to 100. 0 has the middle level for itself; higher priorities
    share the levels above it in equal parts, lower ones the levels below.

    >>> [level_of(p, 10) for p in (-100, -75, -1, 0, 1, 20, 21, 100)] [0, 1, 3, 4, 5, 5, 6, 9]
    """
    middle = (levels - 1) // 2
    if priority == 0 or levels == 1:
        return middle
    if priority > 0:
        above = levels - 1 - middle
        return middle + 1 + (priority - 1) * above // 100 if above else middle
    return middle - 1 - (-priority - 1) * middle // 100 if middle else 0
