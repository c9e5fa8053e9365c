"""Striking a handler from outside, in its thread or on its event loop; who does so holds the task's ``stop_lock``."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from typing import Any

from .handlers import Cancelled, Interrupted
from .receivers import ActiveHandler, Receiver


def cancel(task: Receiver, running: ActiveHandler) -> bool:
    """Stop a handler that an operator asked to stop: one that is awaited is cancelled, another one gets ``Cancelled`` in its
    thread. False: not yet, because what is to be awaited has not begun."""
    with task.interrupt_lock:
        if (
            task.active_handler is not running
            or task.interrupted_for_timeout is running
            or task.interrupted_for_shutdown is running
        ):
            return True
        if (stop := running.context._cancel) is not None:
            call_off(stop)
        elif running.consumer.registration.is_async:
            return False
        else:
            task.interrupted_for_timeout = running
            raise_in(task, Cancelled)
        return True


def call_off(cancel: Callable[..., object], **options: Any) -> None:
    """Cancel what is awaited of a handler."""
    with contextlib.suppress(RuntimeError):  # its event loop is closed: the handler has just ended
        cancel(**options)


def raise_in(task: Receiver, exception: type[Interrupted]) -> None:
    """Raise in the thread of a task, between two bytecodes."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(task.thread_id), ctypes.py_object(exception))
