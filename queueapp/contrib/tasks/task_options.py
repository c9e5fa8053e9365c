"""The ``OPTIONS`` of a backend in ``TASKS``, those of one task, and the mapping of task priorities to levels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from ...errors import InvalidOption
from ...failures.recoverability import OPTIONS as RECOVERABILITY
from ...failures.recoverability import Verdict
from ...options import Option, read_all
from .compat import InvalidTask, Task

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
        "DATABASES: after the commit in that database. None or False: at once.",
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


# -- options of one task: attempts, retry delays and time limit --------------------------------------------------------
#
# From Django 6.1 on, and with the backport, they are arguments of ``@task``; ``@options`` works with all versions. The
# defaults are those of the backend (``OPTIONS``), then of the queue, then of the project.


_FunctionT = TypeVar("_FunctionT", bound=Callable[..., Any])
_MARK = "__queueapp_task_options__"


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueTask(Task):
    """A task with options of its own.

    >>> @task(attempts=3, retry_delay=10, timeout=60)
    ... def send_bill(number): ...
    """

    timeout: timedelta | float | None = None
    attempts: int | None = None
    retry_delay: timedelta | float | None = None
    retry_delay_increase: timedelta | float | None = None
    retry_backoff: float | None = None
    retry_backoff_max: timedelta | float | None = None
    retry_jitter: float | None = None
    immediate_retries: int | None = None
    unrecoverable: tuple[type[BaseException], ...] | None = None
    policy: Callable[[Any], Verdict] | None = None


def options(**given: Any) -> Callable[[_FunctionT], _FunctionT]:
    """Sets the options of a task with any version of Django. Raises InvalidOption.

    >>> @task
    ... @options(attempts=3, retry_delay=10, timeout=60)
    ... def send_bill(number): ...
    """
    read_all(RECOVERABILITY, given, "@options: ")

    def mark(function: _FunctionT) -> _FunctionT:
        if isinstance(function, Task):
            raise InvalidOption("@options", function, "written below @task, next to the function")
        setattr(function, _MARK, given)
        return function

    return mark


def options_of(task: Any) -> dict[str, Any]:
    """The options that a task sets with ``@task`` or ``@options``."""
    options = {option.name: getattr(task, option.name, None) for option in RECOVERABILITY}
    return {**getattr(task.func, _MARK, {}), **{name: value for name, value in options.items() if value is not None}}


def refuse_bad_options(task: Any) -> None:
    """Raise InvalidTask for an invalid option of a task."""
    given = options_of(task)
    if given:
        try:
            read_all(RECOVERABILITY, given, f"{task.module_path}: ")
        except InvalidOption as error:
            raise InvalidTask(str(error)) from error
