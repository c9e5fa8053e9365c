"""What is right: neither type checker may find anything here."""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import assert_type

from django.utils import timezone

from queueapp import Consumer, Context, RetryLater, consumer
from tests.typing.example.models import Orders, Placed


def send() -> None:
    identity = Orders.send(
        Placed(1),
        headers={"a": "b"},
        delay=timedelta(seconds=5),
        expires_in=timedelta(minutes=1),
        priority=2,
        recipient="ship",
        correlation_id="c",
        reply_to="r",
        message_id=uuid.uuid4(),
        isolated=True,
        using="default",
        is_barrier=True,
    )
    assert_type(identity, uuid.UUID)
    Orders.send({"number": 1}, at=timezone.now())
    assert_type(Orders.send_many((Placed(n) for n in range(3)), priority=1, expires_in=timedelta(1)), int)


async def asend() -> None:
    assert_type(await Orders.asend(Placed(1), delay=timedelta(seconds=5), isolated=True), uuid.UUID)
    assert_type(await Orders.asend_many([Placed(1)], recipient="ship", is_barrier=True), int)


@consumer(Orders, name="ship", timeout=5, attempts=3, retry_delay=timedelta(seconds=10), unrecoverable=(KeyError,))
def ship(message: Placed, context: Context) -> int:
    context.extend(timedelta(seconds=5))
    return message.number


@consumer(Orders, policy=lambda failure: RetryLater(timedelta(seconds=1)))
async def bill(message: Placed) -> str:
    return ""


class Refund(Consumer[Placed]):
    queue = Orders
    attempts = 3

    def handle(self, message: Placed, context: Context) -> None:
        assert_type(message.number, int)


async def called_directly(context: Context) -> None:
    assert_type(ship(Placed(1), context), int)
    assert_type(await bill(Placed(1)), str)
