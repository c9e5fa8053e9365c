"""A backend for Django's ``TASKS``: tasks are messages of a queue, run by ``manage.py runqueueworker``.

Its tables belong to an app of their own, so a project without tasks has none of them::

    INSTALLED_APPS = [..., "queueapp", "queueapp.contrib.tasks", "queueapp.workers"]
    TASKS = {"default": {"BACKEND": "queueapp.contrib.tasks.QueueBackend", "QUEUES": ["default", "mail"]}}

READY is a message in the queue or among the delayed ones, RUNNING one that is leased, FAILED one that is poison, and
SUCCESSFUL has a row of its own, kept in the transaction of the ack. A worker that dies leaves none of them RUNNING.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .backend import QueueBackend
    from .task import QueueTask, options

#: Public name -> module. Loaded on first use: an app is imported before Django has its models.
_PUBLIC = {"QueueBackend": "backend", "QueueTask": "task", "options": "task"}

__all__ = ["QueueBackend", "QueueTask", "options"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_PUBLIC[name]}", __name__), name)
