"""Django signals of what happens to messages, and the log of the package.

Receivers run in the worker's thread, after the transaction that did it has committed; one that raises is logged and
changes nothing. ``failure`` is a ``recovery.policy.Failure``, ``verdict`` what was decided.

>>> @receiver(signals.poisoned)
... def page_somebody(sender, failure, verdict, **kwargs): ...
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from django.dispatch import Signal

from . import asides

log = logging.getLogger("queueapp")

retry = Signal()  #: put back, to be received again at once
delayed_retry = Signal()  #: moved to the delayed store
poisoned = Signal()  #: moved to the poison table
discarded = Signal()  #: dropped by a policy's decision
crashed = (
    Signal()
)  #: an AT_MOST_ONCE message was lost with its process: ``queue``, ``seq``, ``text`` (id and headers), ``reason``
expired = Signal()  #: ``count`` messages of ``queue`` were dropped because their time was over


def send(signal: Signal, failure: Any, verdict: Any) -> None:
    """Send a failure's signal; the sender is the queue class."""
    told = partial(signal.send_robust, sender=failure.queue, failure=failure, verdict=verdict)
    try:
        for receiver, result in asides.run("the receivers of a signal", told):
            if isinstance(result, Exception):
                log.error("A receiver of a queueapp signal failed: %r: %r", receiver, result)
    except Exception as error:
        log.error("The receivers of a queueapp signal were interrupted, and perhaps not all told: %r", error)
    level = {"RetryNow": logging.INFO, "RetryLater": logging.WARNING}.get(type(verdict).__name__, logging.ERROR)
    log.log(
        level,
        "%s: message %s attempt %d failed (%s): %s",
        failure.queue._meta.label,
        failure.row.id,
        failure.attempt,
        type(failure.exception).__name__,
        verdict,
        extra={"message_id": str(failure.row.id), "queue": failure.queue._meta.label, "attempt": failure.attempt},
    )
