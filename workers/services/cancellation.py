"""Stopping single handlers that an operator asked to stop, and telling how far they are. Part of the heartbeat: what is asked is
read with the controls of the queues, what is told is written with the beat, so neither costs a statement of its own.

A request is for the attempt that runs when it is made: one that began later is another one, of a message that came again.
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

#: Seconds that the way of a request may take, and two clocks may differ in how long that was.
_SLACK = 0.2


class Stopping:
    """One per heartbeat, and on its thread alone."""

    def __init__(self) -> None:
        #: Those that were asked, and since when.
        self._asked: list[tuple[Receiver, ActiveHandler, float]] = []

    @property
    def waits(self) -> bool:
        """Whether somebody was asked and has not ended."""
        return bool(self._asked)

    def heed(self, pump: QueuePump, text: str, now: datetime) -> None:
        """Ask those handlers of this process that are meant."""
        requests = {one["id"]: one for one in parse_json_list(text) if isinstance(one, dict) and "id" in one}
        for task in pump.receivers:
            running = task.active_handler
            context = running.context if running is not None else None
            if running is None or not isinstance(context, Context) or context._asked is not None:
                continue
            request = requests.get(str(context.message_id))
            if request is not None and monotonic() - running.started + _SLACK >= _age(request, now):
                reason = str(request.get("reason", ""))
                log.warning("%s: the handler of message %d is asked to stop: %s", pump.state.label, running.seq, reason)
                context._asked = MessageCancelled(reason, discard=bool(request.get("discard")))
                self._asked.append((task, running, monotonic()))

    def press(self) -> None:
        """Stop those that were asked: async ones at once, others when their grace is over."""
        if self._asked:
            self._asked = [one for one in self._asked if one[0].active_handler is one[1] and not _stopped(*one)]


def _stopped(task: Receiver, running: ActiveHandler, since: float) -> bool:
    awaited = running.context._cancel is not None or running.consumer.registration.is_async
    if not awaited and monotonic() - since < settings.CANCEL_GRACE.total_seconds():
        return False
    return cancel(task, running)


def _age(request: dict[str, Any], now: datetime) -> float:
    try:
        return max(0.0, (now - datetime.fromisoformat(str(request["at"]))).total_seconds())
    except (KeyError, ValueError, TypeError):
        return float("inf")  # of another version


def in_hand(running: ActiveHandler) -> list[dict[str, Any]]:
    """How far a handler is, as its worker's row tells it; empty where it says nothing. Of a batch, each message that it says it
    of."""
    return [
        {
            "id": str(one.message_id),
            "seq": one.seq,
            "consumer": running.consumer.registration.name,
            "attempt": one.attempt,
            "seconds": round(monotonic() - running.started, 1),
            "done": done,
            "total": total,
            "note": note,
        }
        for one in running.context._telling
        for done, total, note in [one._progress or (0, None, "")]
    ]
