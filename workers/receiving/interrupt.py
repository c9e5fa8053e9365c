"""Interrupts handlers from outside, in their thread or on their event loop. The caller holds the receiver's
``interrupt_lock``."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from typing import Any

from .handlers import Cancelled, Interrupted
from .receivers import ActiveHandler, Receiver


def cancel(receiver: Receiver, active: ActiveHandler) -> bool:
    """Stop a handler that an operator cancelled: what is awaited is cancelled, another handler gets ``Cancelled`` in
    its thread. False: not possible yet, because what is to be awaited has not begun."""
    with receiver.interrupt_lock:
        if (
            receiver.active_handler is not active
            or receiver.interrupted_for_timeout is active
            or receiver.interrupted_for_shutdown is active
        ):
            return True
        if (stop := active.context._cancel) is not None:
            cancel_awaited(stop)
        elif active.consumer.registration.is_async:
            return False
        else:
            receiver.interrupted_for_timeout = active
            raise_in_thread(receiver, Cancelled)
        return True


def cancel_awaited(cancel: Callable[..., object], **options: Any) -> None:
    """Cancel what a handler awaits."""
    with contextlib.suppress(RuntimeError):  # its event loop is closed: the handler has just ended
        cancel(**options)


def raise_in_thread(receiver: Receiver, exception: type[Interrupted]) -> None:
    """Raise in the receiver's thread, between two bytecodes."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(receiver.thread_id), ctypes.py_object(exception))
