"""Which pages of the admin's index a project needs: those of features that it does not use are left out.

A hidden page still answers under its address, for rows from a time when the feature was used. The overview of the
queues links to schedules and operations, which any project can make there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..conf import settings
from ..models import Alert, BulkOperation, JournalEntry, MessageGroup, MessageResult, Schedule, SubjectKey, Subscription
from ..registry import queues
from ..schedules import declarations

_IN_USE: dict[Any, Callable[[], bool]] = {
    Alert: lambda: bool(settings.ALERTS),
    BulkOperation: lambda: False,
    JournalEntry: lambda: bool(settings.JOURNAL),
    MessageGroup: lambda: any(queue.delivery.groups for queue in queues),
    MessageResult: lambda: any(queue.delivery.workflow for queue in queues),
    Schedule: lambda: bool(declarations.declared),
    SubjectKey: lambda: any(queue.delivery.encrypts for queue in queues),
    Subscription: lambda: any(queue.delivery.recipients for queue in queues),
}


def in_use(model: Any) -> bool:
    """Whether a setting or a queue of this project makes rows of the model."""
    return model not in _IN_USE or _IN_USE[model]()
