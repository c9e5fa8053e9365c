"""What somebody gets wrong who receives by hand, and what is told of messages that are dropped there."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from queueapp import QueueError, signals
from tests.inprocess import real_commits
from tests.testapp.models import Leased, Transactional

pytestmark = real_commits


def test_a_message_that_was_dropped_in_a_transaction_that_is_rolled_back_is_not_told() -> None:
    told: list[Any] = []
    receiver = lambda sender, ids, **kwargs: told.extend(ids)  # noqa: E731
    signals.expired.connect(receiver, sender=Transactional)
    Transactional.send({"n": 1})

    with contextlib.suppress(ZeroDivisionError), Transactional.receive() as batch:
        (message,) = batch
        message.expire()
        raise ZeroDivisionError
    signals.expired.disconnect(receiver, sender=Transactional)

    assert told == []
    assert Transactional.objects.count() == 1


def test_iterating_without_with_says_how_it_is_meant() -> None:
    Leased.send({"n": 1})
    with pytest.raises(QueueError, match=r"write `with Leased\.receive\(\.\.\.\) as batch:`"):
        list(Leased.receive())
    with pytest.raises(QueueError, match="Nothing was received yet"):
        asyncio.run(_without_with())
    assert Leased.objects.count() == 1


async def _without_with() -> None:
    async for _ in Leased.areceive():
        pass
