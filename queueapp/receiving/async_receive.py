"""``Queue.areceive()``: ``receive()`` for async code, on the thread that Django's async ORM uses.

An asyncio task may be cancelled at any await. Work that the thread has begun is awaited, and entering the block is
undone, so that no transaction stays open on that thread and every message is ended or available.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

from ..consuming.shielded import run_shielded
from .message import Message
from .receive import Receive


class AsyncReceive:
    """``async with Queue.areceive(10) as batch: async for message in batch: await message.ack()``.

    Every call runs on the thread of Django's async ORM, so in the same connection and transaction.
    """

    def __init__(self, queue: Any, max_backlog: int = 1, **options: Any) -> None:
        self._receive = Receive(queue, max_backlog, **options)

    async def __aenter__(self) -> AsyncReceive:
        await run_shielded(self._receive.__enter__, undo=self._receive.__exit__)
        return self

    async def __aexit__(self, *exc: Any) -> None:
        await run_shielded(self._receive.__exit__, *exc, droppable=False)

    def __len__(self) -> int:
        return len(self._receive)

    def __getitem__(self, index: int) -> AsyncMessage:
        return AsyncMessage(self._receive[index])

    async def __aiter__(self) -> AsyncIterator[AsyncMessage]:
        for message in self._receive:
            yield AsyncMessage(message)


class AsyncMessage:
    """A message whose terminal methods are coroutines; everything else is as in ``Message``."""

    def __init__(self, message: Message) -> None:
        self._message = message

    def __getattr__(self, name: str) -> Any:
        return getattr(self._message, name)

    async def ack(self) -> None:
        """See ``Message.ack``."""
        await run_shielded(self._message.ack)

    async def cancel(self) -> None:
        """See ``Message.cancel``."""
        await run_shielded(self._message.cancel)

    async def expire(self, reason: str = "dropped by its receiver") -> None:
        """See ``Message.expire``."""
        await run_shielded(self._message.expire, reason)

    async def extend(self, period: timedelta | None = None) -> None:
        """See ``Message.extend``."""
        await run_shielded(self._message.extend, period)
