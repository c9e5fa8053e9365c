"""Mistakes in manual receiving, and what is logged of messages that are dropped there."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from queueapp import QueueError, signals
from tests.in_process_worker import real_commits
from tests.testapp.models import AtMostOnce, Leased, Transactional

pytestmark = real_commits


def test_a_message_that_was_dropped_in_a_transaction_that_is_rolled_back_is_not_reported() -> None:
    reported: list[Any] = []
    receiver = lambda sender, ids, **kwargs: reported.extend(ids)  # noqa: E731
    signals.expired.connect(receiver, sender=Transactional)
    Transactional.send({"n": 1})

    with contextlib.suppress(ZeroDivisionError), Transactional.receive() as batch:
        (message,) = batch
        message.expire()
        raise ZeroDivisionError
    signals.expired.disconnect(receiver, sender=Transactional)

    assert reported == []
    assert Transactional.objects.count() == 1


@pytest.mark.parametrize("queue", [Transactional, AtMostOnce])
def test_a_message_that_its_receiver_drops_is_logged_without_leases_too(queue: Any) -> None:
    reported: list[Any] = []
    receiver = lambda sender, ids, reason, **kwargs: reported.append((ids, reason, queue.objects.count()))  # noqa: E731
    signals.expired.connect(receiver, sender=queue)
    queue.send({"n": 1})
    queue.send({"n": 2})

    with queue.receive(2) as batch:
        first, second = batch
        first.expire("too late")
        second.ack()
    signals.expired.disconnect(receiver, sender=queue)

    assert reported == [([first.id], "too late", 0)], "after the commit"


def test_iterating_without_with_states_how_it_is_meant() -> None:
    Leased.send({"n": 1})
    with pytest.raises(QueueError, match=r"write `with Leased\.receive\(\.\.\.\) as batch:`"):
        list(Leased.receive())
    with pytest.raises(QueueError, match="Nothing was received yet"):
        asyncio.run(_without_with())
    assert Leased.objects.count() == 1


async def _without_with() -> None:
    async for _ in Leased.areceive():
        pass
