"""A backend for Django's ``TASKS``: tasks are messages of a queue, run by ``manage.py runqueueworker``.

The tables belong to this app, so that a project without tasks does not have them::

    INSTALLED_APPS = [..., "queueapp", "queueapp.contrib.tasks", "queueapp.workers"]
    TASKS = {"default": {"BACKEND": "queueapp.contrib.tasks.QueueBackend", "QUEUES": ["default", "mail"]}}

A READY task is a message in the queue or a delayed message, a RUNNING one a leased message, a FAILED one a poison
message. A SUCCESSFUL one has a row, written in the transaction of the ack. A worker that dies leaves no task RUNNING:
its leases expire.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .backend import QueueBackend
    from .task_options import QueueTask, options

#: Public name -> module. Loaded on first use: an app is imported before Django has its models.
_PUBLIC = {"QueueBackend": "backend", "QueueTask": "task_options", "options": "task_options"}

__all__ = ["QueueBackend", "QueueTask", "options"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_PUBLIC[name]}", __name__), name)
