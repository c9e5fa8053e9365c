"""What is wrong: both type checkers have to find each line that says so, and no other."""

from __future__ import annotations

from queueapp import Context, consumer
from tests.typing.example.models import Orders, Placed


def send() -> None:
    Orders.send(Placed(1), delay=5)  # wrong
    Orders.send(Placed(1), prioriti=1)  # wrong
    Orders.send(Placed(1), isolated="yes")  # wrong
    Orders.send(Placed(1), is_barrier=1)  # wrong
    Orders.send_many([Placed(1)], priority="high")  # wrong
    Orders.send_many([Placed(1)], isolated=True)  # wrong
    Orders.send_many(Placed(1))  # wrong


async def asend() -> None:
    await Orders.asend(Placed(1), at="tomorrow")  # wrong
    await Orders.asend_many([Placed(1)], delay=None)  # wrong


@consumer(Orders)
def ship(message: Placed, context: Context) -> int:
    return message.number


def declare() -> None:
    consumer(ship)  # wrong
    consumer("example.Orders")  # wrong
    consumer(Orders, retries=5)  # wrong
    consumer(Orders, attempts="3")  # wrong


def called_directly(context: Context) -> None:
    ship("1", context)  # wrong
    ship(Placed(1))  # wrong
    text: str = ship(Placed(1), context)  # wrong
    print(text)
