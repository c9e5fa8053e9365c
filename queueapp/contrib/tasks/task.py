"""Options of one task: attempts, retry delays and time limit.

From Django 6.1 on, and with the backport, they are arguments of ``@task``; ``@options`` works with all versions. The
defaults are those of the backend (``OPTIONS``), then of the queue, then of the project.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from ...errors import InvalidOption
from ...failures.recoverability import OPTIONS, Verdict
from ...options import read_all
from .compat import InvalidTask, Task

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
    read_all(OPTIONS, given, "@options: ")

    def mark(function: _FunctionT) -> _FunctionT:
        if isinstance(function, Task):
            raise InvalidOption("@options", function, "written below @task, next to the function")
        setattr(function, _MARK, given)
        return function

    return mark


def options_of(task: Any) -> dict[str, Any]:
    """The options that a task sets with ``@task`` or ``@options``."""
    own = {option.name: getattr(task, option.name, None) for option in OPTIONS}
    return {**getattr(task.func, _MARK, {}), **{name: value for name, value in own.items() if value is not None}}


def refuse_bad_options(task: Any) -> None:
    """Raise InvalidTask for an invalid option of a task."""
    given = options_of(task)
    if given:
        try:
            read_all(OPTIONS, given, f"{task.module_path}: ")
        except InvalidOption as error:
            raise InvalidTask(str(error)) from error
