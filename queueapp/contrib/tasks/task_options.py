"""``OPTIONS`` of a backend in ``TASKS``, and how its priorities map onto the levels of a queue."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from ...failures.recoverability import OPTIONS as RECOVERABILITY
from ...options import Option, read_all

#: The queue that is used when nothing else is said.
OWN_QUEUE = "queueapp_tasks.TaskQueue"
#: Whom tasks are addressed to where QUEUES is empty, so that any name of a queue will do.
ANY = "tasks"


def _are_names(value: Any) -> bool:
    return all(isinstance(one, str) and one for one in value)


OPTIONS: tuple[Option, ...] = (
    Option("queue", str, OWN_QUEUE, "Label (app.Model) of the queue that its tasks wait in."),
    Option(
        "enqueue_on_commit",
        str,
        None,
        "True: a task is stored after the commit of the open transaction of the queue's database. A string: of the database "
        "with this alias, where the queue lies in another one. None or False: at once.",
        optional=True,
    ),
    Option(
        "retention",
        timedelta,
        timedelta(days=7),
        "How long results are kept after the end of their task; None: for ever; 0: none is kept, and get_result() is refused.",
        low=timedelta(0),
        high=timedelta(days=36500),
        optional=True,
    ),
    Option(
        "work",
        list,
        None,
        "The queue names whose tasks are run by the workers that are started with these settings; None: all of QUEUES.",
        optional=True,
        accept=_are_names,
    ),
    Option(
        "modules",
        list,
        [],
        "Packages beside those of INSTALLED_APPS in which tasks may be: a worker imports a task's module from no other.",
        accept=_are_names,
    ),
    *RECOVERABILITY,
)


class Configuration:
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
        #: Those of a task that says nothing of its own.
        self.recoverability = {one.name: given[one.name] for one in RECOVERABILITY if one.name in given}

    @property
    def keeps_results(self) -> bool:
        """Whether the results of successful tasks are kept at all."""
        return self.retention is None or self.retention > timedelta(0)


def _plain(name: str, value: Any) -> Any:
    if name == "enqueue_on_commit" and isinstance(value, bool):
        return "" if value else None
    return list(value) if name in ("work", "modules") and isinstance(value, tuple | set) else value


def level_of(priority: int, levels: int) -> int:
    """The level of a queue for a task's priority, -100 to 100. 0 has the level in the middle for itself; those above share
    the levels above it in equal parts, those below the ones below.

    >>> [level_of(p, 10) for p in (-100, -75, -1, 0, 1, 20, 21, 100)]
    [0, 1, 3, 4, 5, 5, 6, 9]
    """
    middle = (levels - 1) // 2
    if priority == 0 or levels == 1:
        return middle
    if priority > 0:
        above = levels - 1 - middle
        return middle + 1 + (priority - 1) * above // 100 if above else middle
    return middle - 1 - (-priority - 1) * middle // 100 if middle else 0
