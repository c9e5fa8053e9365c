"""Django signals of what happens to messages, and the log of the package.

Receivers run in the worker's thread, after the transaction that did it has committed; one that raises is logged and
changes nothing. ``failure`` is a ``recovery.policy.Failure``, ``verdict`` what was decided.

>>> @receiver(signals.poisoned)
... def page_somebody(sender, failure, verdict, **kwargs): ...
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from django.dispatch import Signal

from . import callbacks

log = logging.getLogger("queueapp")

retry = Signal()  #: put back, to be received again at once
delayed_retry = Signal()  #: moved to the delayed store
poisoned = Signal()  #: moved to the poison table: by a verdict, by the delayed dispatcher, by hand
discarded = Signal()  #: dropped by a policy's decision
crashed = (
    Signal()
)  #: an AT_MOST_ONCE message was lost with its process: ``queue``, ``seq``, ``text`` (id and headers), ``reason``
#: ``count`` messages of ``queue`` were given up: their ``ids``, the ``reason`` in words, and all ``reasons``, a tuple
#: of time_limit, forced_expire, max_cancels and max_deliveries
expired = Signal()

alerted = Signal()  #: ``alert``, an ``alerts.channels.Notification``, was raised, or is over (``alert.resolved``)

#: The reason of messages that were not received in time; others have the reason that their receiver gave.
TIME_IS_OVER = "its time was over"


def send(signal: Signal, failure: Any, verdict: Any, *, failed: bool = True) -> None:
    """Send a failure's signal; the sender is the queue class. ``failed=False``: nothing has, so it is not logged as
    that."""
    _tell(partial(signal.send_robust, sender=failure.queue, failure=failure, verdict=verdict))
    if failed:
        _log(failure, verdict)


def send_expired(queue: Any, ids: Sequence[uuid.UUID], reason: str, reasons: Sequence[str] = ("time_limit",)) -> None:
    """Tell of messages that were given up, if there are any. ``reason``: in words; '' for those of ``reasons``."""
    if not ids:
        return
    words = reason or (TIME_IS_OVER if tuple(reasons) == ("time_limit",) else ", ".join(reasons))
    send = partial(
        expired.send_robust,
        sender=queue,
        queue=queue,
        count=len(ids),
        ids=list(ids),
        reason=words,
        reasons=tuple(reasons),
    )
    _tell(send)


def send_crashed(queue: Any, seq: int, text: str, reason: str) -> None:
    """Tell of an AT_MOST_ONCE message that was lost with its process."""
    _tell(partial(crashed.send_robust, sender=queue, queue=queue, seq=seq, text=text, reason=reason))


def send_alert(alert: Any) -> None:
    """Tell of an alert."""
    send = partial(alerted.send_robust, sender=None, alert=alert)
    for receiver, result in callbacks.run("the receivers of a signal", send):
        if isinstance(result, Exception):
            log.error("A receiver of a queueapp signal failed: %r: %r", receiver, result)


def _tell(send: Callable[[], Sequence[tuple[Any, Any]]]) -> None:
    try:
        for receiver, result in callbacks.run("the receivers of a signal", send):
            if isinstance(result, Exception):
                log.error("A receiver of a queueapp signal failed: %r: %r", receiver, result)
    except Exception as error:
        log.error("The receivers of a queueapp signal were interrupted, and perhaps not all called: %r", error)


#: An attempt that is repeated is logged at a lower level than the last one.
_LEVELS = {"RetryNow": logging.INFO, "RetryLater": logging.WARNING}


def _log(failure: Any, verdict: Any) -> None:
    """Log a failed attempt with its traceback. The facts are attributes of the record, for JSON and for filters."""
    queue, exception = failure.queue._meta.label if failure.queue is not None else "(no such queue)", failure.exception
    text = " ".join(str(exception).split())[:500]
    log.log(
        _LEVELS.get(type(verdict).__name__, logging.ERROR),
        "%s: attempt %d of message %s failed: %s%s; %s.",
        queue,
        failure.attempt,
        failure.row.id,
        type(exception).__name__,
        f": {text}" if text else "",
        _next_step(verdict),
        exc_info=exception,
        extra={
            "message_id": str(failure.row.id),
            "message_type": failure.message_type,
            "queue": queue,
            "consumer": failure.consumer.name if failure.consumer is not None else "",
            "attempt": failure.attempt,
            "verdict": type(verdict).__name__,
        },
    )


def _next_step(verdict: Any) -> str:
    """A verdict in words."""
    name = type(verdict).__name__
    if name == "RetryLater":
        return f"retrying in {verdict.delay.total_seconds():g} s"
    return {"RetryNow": "retrying now", "Poison": "kept as poison", "Discard": "discarded"}.get(name, str(verdict))
