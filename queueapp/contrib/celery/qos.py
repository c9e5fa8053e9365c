"""A delivered message, and a channel's record of the deliveries that are not ended yet."""

from __future__ import annotations

import sys
from collections import OrderedDict
from typing import Any

from kombu.transport import virtual

from .in_flight import LeasedMessage


class Delivered(virtual.Message):
    """A message that was received. If its body does not decode, an ack moves it to poison: acking is all that Celery
    does with such a message."""

    def __init__(self, payload: dict[str, Any], channel: Any = None, **kwargs: Any) -> None:
        super().__init__(payload, channel=channel, **kwargs)
        self.lease: LeasedMessage | None = payload.get("lease")
        self.undecodable: BaseException | None = None
        #: Why it is rejected, where that is known, and further columns of its poison record.
        self.reason = ""
        self.failure: dict[str, Any] = {}
        #: Number of deliveries so far, and whether its task ended the process that ran it.
        self.deliveries: int = payload.get("deliveries", 1)
        self.process_died = False
        #: The queue it was received from.
        self.queue = ""

    def _decode(self) -> Any:
        try:
            return super()._decode()
        except Exception as error:
            self.undecodable = error
            raise

    def ack(self, multiple: bool = False) -> None:
        if not self.decode_error() or self.lease is None or self.acknowledged:
            super().ack(multiple=multiple)
            return
        self.reject(requeue=False)

    def decode_error(self) -> str:
        """Why its body does not decode; '' if it was decoded, or decoding was not tried."""
        error = self.undecodable or (self.errors[0][1] if self.errors else None)
        return f"The body does not decode: {type(error).__name__}: {error}" if error is not None else ""


class QoS(virtual.QoS):
    """The deliveries that are not ended. The thread that ends one removes its entry; ``pop`` is atomic."""

    _delivered: OrderedDict[str, Delivered]

    def append(self, message: Delivered, delivery_tag: str) -> None:
        self._delivered[delivery_tag] = message

    def can_consume(self) -> bool:
        limit = self.prefetch_count
        return not limit or len(self._delivered) < limit

    def can_consume_max_estimate(self) -> int | None:
        limit = self.prefetch_count
        return max(limit - len(self._delivered), 0) if limit else None

    def ack(self, delivery_tag: str) -> None:
        message = self._delivered.pop(delivery_tag, None)
        if message is not None and message.lease is not None:
            self.channel.acked(message.lease)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        message = self._delivered.pop(delivery_tag, None)
        if message is None or message.lease is None:
            return
        if requeue and not self.channel.is_spent(message):
            self.channel.release([message.lease], cancelled=True)
        else:
            self.channel.move_to_poison(message)

    def restore_unacked(self) -> list[Any]:
        delivered = self._delivered
        self._delivered = OrderedDict()
        leases = [message.lease for message in delivered.values() if message.lease is not None]
        if leases:
            self.channel.release(leases, cancelled=True)
        return []

    def restore_unacked_once(self, stderr: Any = None) -> None:
        self._on_collect.cancel()
        if self.restore_at_shutdown and self.channel.do_restore:
            self.restore_unacked()


def rejection_reason(message: Delivered) -> str:
    """The likely reason for a rejection that gave none."""
    if undecoded := message.decode_error():
        return undecoded
    task = message.headers.get("task")
    if "celery" in sys.modules and task is not None:
        from celery import current_app

        if not isinstance(task, str) or task not in current_app.tasks:
            return f"This worker has no task {task!r:.300}."
        if (eta := message.headers.get("eta")) and (problem := _eta_error(eta)):
            return f"The worker cannot wait for the eta {eta!r:.100}: {problem}."
    return "Rejected by its consumer."


def _eta_error(eta: Any) -> str:
    """The error that a worker meets when it converts this eta, for which it rejects the task; '' if there is none."""
    from celery.utils.time import maybe_iso8601, timezone
    from kombu.asynchronous.timer import to_timestamp

    try:
        to_timestamp(timezone.to_system(maybe_iso8601(eta)))
    except (OverflowError, ValueError) as error:
        return str(error)
    return ""
