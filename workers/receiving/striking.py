"""Striking a handler from outside, in its thread or on its event loop; who does so holds the task's ``stop_lock``."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from typing import Any

from .handlers import Cancelled, Interrupted
from .receivers import Running, Task


def cancel(task: Task, running: Running) -> bool:
    """Stop a handler that an operator asked to stop: one that is awaited is cancelled, another one gets ``Cancelled`` in its
    thread. False: not yet, because what is to be awaited has not begun."""
    with task.stop_lock:
        if task.running is not running or task.hit is running or task.cut_off is running:
            return True
        if (stop := running.context._cancel) is not None:
            call_off(stop)
        elif running.entry.registration.is_async:
            return False
        else:
            task.hit = running
            raise_in(task, Cancelled)
        return True


def call_off(cancel: Callable[..., object], **options: Any) -> None:
    """Cancel what is awaited of a handler."""
    with contextlib.suppress(RuntimeError):  # its event loop is closed: the handler has just ended
        cancel(**options)


def raise_in(task: Task, exception: type[Interrupted]) -> None:
    """Raise in the thread of a task, between two bytecodes."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(task.thread_id), ctypes.py_object(exception))
