"""Stops single handlers at an operator's request, and reports their progress.

Part of the heartbeat: requests are read with the controls of the queues and progress is written with the heartbeat, so
neither costs a statement of its own. A request applies to the attempt that runs when it is made: an attempt that began
later is of a message that was delivered again.
"""

from __future__ import annotations

import logging
from datetime import datetime
from time import monotonic
from typing import Any

from queueapp.conf import settings
from queueapp.consuming.context import Context
from queueapp.errors import MessageCancelled
from queueapp.models.subscribers import parse_json_list

from ..receiving.interrupt import cancel
from ..receiving.pump import QueuePump
from ..receiving.receivers import ActiveHandler, Receiver

log = logging.getLogger("queueapp.workers")

#: Seconds that a request may take to arrive, and by which two clocks may differ in measuring that.
_TOLERANCE = 0.2


class Cancellation:
    """One per heartbeat, used by its thread only."""

    def __init__(self) -> None:
        #: Handlers that were asked to stop, and since when.
        self._requested: list[tuple[Receiver, ActiveHandler, float]] = []

    @property
    def is_pending(self) -> bool:
        """Whether a handler was asked to stop and has not ended."""
        return bool(self._requested)

    def poll(self, pump: QueuePump, text: str, now: datetime) -> None:
        """Ask the handlers of this process that the requests name to stop. ``text``: the requests as their column holds
        them."""
        requests = {
            request["id"]: request for request in parse_json_list(text) if isinstance(request, dict) and "id" in request
        }
        for receiver in pump.receivers:
            handler = receiver.active_handler
            context = handler.context if handler is not None else None
            if handler is None or not isinstance(context, Context) or context._asked is not None:
                continue
            request = requests.get(str(context.message_id))
            if request is not None and monotonic() - handler.started + _TOLERANCE >= _age(request, now):
                reason = str(request.get("reason", ""))
                label = pump.state.label
                log.warning(
                    "%s: the handler of message %d is asked to stop: %s", label, handler.seq, reason,
                    extra={"queue": label, "seq": handler.seq},
                )  # fmt: skip
                context._asked = MessageCancelled(reason, discard=bool(request.get("discard")))
                self._requested.append((receiver, handler, monotonic()))

    def escalate(self) -> None:
        """Stop the handlers that were asked: async ones at once, others when ``CANCEL_GRACE`` is over."""
        if self._requested:
            self._requested = [
                (receiver, handler, since)
                for receiver, handler, since in self._requested
                if receiver.active_handler is handler and not _stopped(receiver, handler, since)
            ]


def _stopped(receiver: Receiver, handler: ActiveHandler, since: float) -> bool:
    awaited = handler.context._cancel is not None or handler.consumer.registration.is_async
    if not awaited and monotonic() - since < settings.CANCEL_GRACE.total_seconds():
        return False
    return cancel(receiver, handler)


def _age(request: dict[str, Any], now: datetime) -> float:
    try:
        return max(0.0, (now - datetime.fromisoformat(str(request["at"]))).total_seconds())
    except (KeyError, ValueError, TypeError):
        return float("inf")  # written by another version


def progress_of(handler: ActiveHandler) -> list[dict[str, Any]]:
    """The progress of a handler as its worker's row holds it: one entry per message of which it reports progress."""
    return [
        {
            "id": str(context.message_id),
            "seq": context.seq,
            "consumer": handler.consumer.registration.name,
            "attempt": context.attempt,
            "seconds": round(monotonic() - handler.started, 1),
            "done": done,
            "total": total,
            "note": note,
        }
        for context in handler.context._with_progress
        for done, total, note in [context._progress or (0, None, "")]
    ]
