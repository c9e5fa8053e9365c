"""``ReplyMixin``: what a handler sends by its context: answers, and messages to queues and topics."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from .. import messages
from ..errors import InvalidMessage
from ..registry import queues
from .shielded import run_shielded

#: ``queueapp.publish``, which is in a higher layer; set when the app is ready.
publisher: Callable[..., uuid.UUID] | None = None


class ReplyMixin:
    """Sending methods for an object with the well-known headers of a message and its id."""

    __slots__ = ()

    if TYPE_CHECKING:

        @property
        def message_id(self) -> uuid.UUID: ...
        @property
        def reply_to(self) -> str | None: ...
        @property
        def correlation_id(self) -> str | None: ...

    def reply(self, body: Any, **options: Any) -> uuid.UUID:
        """Answer: send to the queue that the sender named (``reply_to``), with the message's correlation id, or its id
        if it has none. The other arguments are those of ``Queue.send``. Raises InvalidMessage if the sender named no
        queue, and QueueNotFound if this process does not know it."""
        if not self.reply_to:
            raise InvalidMessage(f"Message {self.message_id} names no address for an answer (reply_to).")
        queue = queues.find_by_address(self.reply_to)
        options.setdefault("correlation_id", self.correlation_id or str(self.message_id))
        if queue.wire_format:
            options["headers"] = {messages.NSB_INTENT: "Reply"} | dict(options.get("headers") or {})
        identity: uuid.UUID = queue.send(body, **options)
        return identity

    def send(self, queue: Any, body: Any, **options: Any) -> uuid.UUID:
        """``queue.send(body, ...)``; either way the message gets correlation headers."""
        identity: uuid.UUID = queue.send(body, **options)
        return identity

    def publish(self, topic: Any, *body: Any, **options: Any) -> uuid.UUID:
        """``queueapp.publish``."""
        assert publisher is not None, "the app is not ready"
        return publisher(topic, *body, **options)

    async def areply(self, body: Any, **options: Any) -> uuid.UUID:
        """``reply`` for async handlers."""
        return await run_shielded(partial(self.reply, body, **options))

    async def asend(self, queue: Any, body: Any, **options: Any) -> uuid.UUID:
        """``send`` for async handlers."""
        return await run_shielded(partial(self.send, queue, body, **options))

    async def apublish(self, topic: Any, *body: Any, **options: Any) -> uuid.UUID:
        """``publish`` for async handlers."""
        return await run_shielded(partial(self.publish, topic, *body, **options))
