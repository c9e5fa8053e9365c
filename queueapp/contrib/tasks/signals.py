"""``task_finished`` of a task that has failed for good: sent once that is committed, whoever found it out: the policy after the
last attempt, a supervisor whose worker died, an operator.
"""

from __future__ import annotations

from typing import Any

from ... import signals
from ...consuming.registry import registered


def connect() -> None:
    """Listen to what the engine tells."""
    signals.poisoned.connect(_failed, dispatch_uid="queueapp.contrib.tasks.poisoned")
    signals.discarded.connect(_failed, dispatch_uid="queueapp.contrib.tasks.discarded")


def _failed(sender: Any, failure: Any, **_: Any) -> None:
    from . import consumers, result_reader, result_store
    from .compat import TaskResultStatus, task_finished

    if sender is None or not isinstance(registered.resolver_of(sender), consumers.TaskFinder):
        return
    began = failure.items.get(consumers.BEGAN)
    result = result_reader.read(sender, began[0] if began else result_store.alias_of(sender), failure.row.id)
    if result is None or result.status != TaskResultStatus.FAILED:
        return  # requeued meanwhile, or nothing is kept of what a policy discards
    try:
        raise failure.exception
    except BaseException:  # within: receivers, Django's own log among them, ask which exception is being handled
        consumers.tell(task_finished, result)
