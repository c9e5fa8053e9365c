"""What the tests of filling share."""

from __future__ import annotations

from typing import Any

from queueapp import publish_many
from queueapp.topics.backfill import QueueFeeder
from tests.queueapp.sql.server import Server


def put(server: Server, topic: str, *numbers: int, **options: Any) -> None:
    publish_many(topic, [{"n": n} for n in numbers], using=server.alias, **options)


def numbers(server: Server, queue: Any) -> list[int]:
    """What is in a queue, in its order."""
    bodies = queue.objects.using(server.alias).order_by("seq").values_list("body", flat=True)
    return [int(bytes(body).removeprefix(b'{"n":').removesuffix(b"}")) for body in bodies]


def take(server: Server, queue: Any, count: int) -> None:
    """Receive and ack so many."""
    while count:
        with queue.receive(max_backlog=min(count, 500), using=server.alias) as batch:
            for message in batch:
                message.ack()
                count -= 1


def filled(server: Server, queue: Any, *, limit: int = 1000) -> int:
    """Attach a queue and fill it until nothing is left; how many messages it got."""
    feeder, total = QueueFeeder(queue, server.alias), 0
    feeder.attach()
    while True:
        fill = feeder.fill(limit)
        total += fill.copied
        if not fill.more or fill.full_with is not None:
            return total
