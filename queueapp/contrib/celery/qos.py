"""A message that was delivered, and what a channel knows of those that are not ended yet."""

from __future__ import annotations

import sys
from collections import OrderedDict
from typing import Any

from kombu.transport import virtual

from .in_flight import LeasedMessage


class Delivered(virtual.Message):
    """A message that was received. One whose body does not decode is kept when its consumer acks it, which is all that Celery
    can do with it."""

    def __init__(self, payload: dict[str, Any], channel: Any = None, **kwargs: Any) -> None:
        super().__init__(payload, channel=channel, **kwargs)
        self.held: LeasedMessage | None = payload.get("held")
        self.undecodable: BaseException | None = None
        #: Why it is rejected, where somebody knows; and what else is written down of that.
        self.reason = ""
        self.failure: dict[str, Any] = {}
        #: How often it was handed out by now; and whether its task has ended the process that ran it.
        self.deliveries: int = payload.get("deliveries", 1)
        self.died = False
        #: The queue it was received from.
        self.queue = ""

    def _decode(self) -> Any:
        try:
            return super()._decode()
        except Exception as error:
            self.undecodable = error
            raise

    def ack(self, multiple: bool = False) -> None:
        if not self.why_not_decoded() or self.held is None or self.acknowledged:
            super().ack(multiple=multiple)
            return
        self.reject(requeue=False)

    def why_not_decoded(self) -> str:
        """Why nothing can be made of its body; '': it was decoded, or nobody has tried."""
        error = self.undecodable or (self.errors[0][1] if self.errors else None)
        return f"The body does not decode: {type(error).__name__}: {error}" if error is not None else ""


class QoS(virtual.QoS):
    """What was delivered and is not ended. An entry is taken away by whoever ends it, on any thread: ``pop`` is atomic."""

    _delivered: OrderedDict[str, Delivered]

    def append(self, message: Delivered, delivery_tag: str) -> None:
        self._delivered[delivery_tag] = message

    def can_consume(self) -> bool:
        most = self.prefetch_count
        return not most or len(self._delivered) < most

    def can_consume_max_estimate(self) -> int | None:
        most = self.prefetch_count
        return max(most - len(self._delivered), 0) if most else None

    def ack(self, delivery_tag: str) -> None:
        message = self._delivered.pop(delivery_tag, None)
        if message is not None and message.held is not None:
            self.channel.acked(message.held)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        message = self._delivered.pop(delivery_tag, None)
        if message is None or message.held is None:
            return
        if requeue and not self.channel.is_spent(message):
            self.channel.give_back([message.held], handled=True)
        else:
            self.channel.bury(message)

    def restore_unacked(self) -> list[Any]:
        delivered = self._delivered
        self._delivered = OrderedDict()
        held = [message.held for message in delivered.values() if message.held is not None]
        if held:
            self.channel.give_back(held, handled=True)
        return []

    def restore_unacked_once(self, stderr: Any = None) -> None:
        self._on_collect.cancel()
        if self.restore_at_shutdown and self.channel.do_restore:
            self.restore_unacked()


def why(message: Delivered) -> str:
    """Why a consumer may have rejected a message that says nothing of it."""
    if undecoded := message.why_not_decoded():
        return undecoded
    task = message.headers.get("task")
    if "celery" in sys.modules and task is not None:
        from celery import current_app

        if not isinstance(task, str) or task not in current_app.tasks:
            return f"This worker knows no task {task!r:.300}."
        if (eta := message.headers.get("eta")) and (problem := _why_not_due(eta)):
            return f"Its eta {eta!r:.100} is no time that a worker can wait for: {problem}."
    return "Rejected by its consumer."


def _why_not_due(eta: Any) -> str:
    """What a worker finds when it makes a time to wait for of an eta ('': nothing); then it rejects the task."""
    from celery.utils.time import maybe_iso8601, timezone
    from kombu.asynchronous.timer import to_timestamp

    try:
        to_timestamp(timezone.to_system(maybe_iso8601(eta)))
    except (OverflowError, ValueError) as error:
        return str(error)
    return ""
