"""A Redis for the session, emptied for each test, and both brokers as a program on kombu sees them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import kombu
import pytest

from queueapp.contrib.celery.broker_migration import Broker, Migrator, broker_at
from tests.redis import find_redis, running_redis


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if find_redis() is None:
        pytest.skip("needs redis-server (Debian's package)")
    with running_redis(tmp_path_factory.mktemp("redis")) as url:
        yield url


@pytest.fixture
def redis_url(redis_server: str) -> Iterator[str]:
    import redis

    yield redis_server
    redis.Redis.from_url(redis_server).flushall()


@pytest.fixture
def ours_url(alias: str) -> str:
    return f"queueapp://{alias}"


@pytest.fixture
def at() -> Iterator[Any]:
    """Brokers at URLs, closed with the test."""
    made: list[Broker] = []

    def broker(url: str, **options: Any) -> Broker:
        made.append(broker_at(url, **options))
        return made[-1]

    yield broker
    for item in made:
        item.close()


class Shop:
    """A program that publishes to a broker and reads from it."""

    def __init__(self, url: str) -> None:
        self.connection = kombu.Connection(url)
        self.channel: Any = self.connection.default_channel

    def publish(self, queue: str, number: int, **options: Any) -> None:
        declared = kombu.Queue(queue, kombu.Exchange(queue, "direct"), queue, durable=True)
        headers = {"id": f"00000000-0000-4000-8000-{number:012d}", "task": "count", **options.pop("headers", {})}
        kombu.Producer(self.channel).publish(
            [[number], {}, {}], exchange=declared.exchange, routing_key=queue, declare=[declared], serializer="json",
            headers=headers, correlation_id=headers["id"], **options,
        )  # fmt: skip

    def received(self, queue: str) -> list[Any]:
        """All that is there, acked, in its order."""
        found = []
        while (message := self.channel.basic_get(queue, no_ack=False)) is not None:
            found.append(message)
            message.ack()
        return found

    def numbers(self, queue: str) -> list[int]:
        return [message.decode()[0][0] for message in self.received(queue)]

    def close(self) -> None:
        self.connection.release()


@pytest.fixture
def shop() -> Iterator[Any]:
    shops: list[Shop] = []

    def open_shop(url: str) -> Shop:
        shops.append(Shop(url))
        return shops[-1]

    yield open_shop
    for shop in shops:
        shop.close()


def move(source: Broker, target: Broker, **options: Any) -> Migrator:
    """Until nothing is left."""
    migrator = Migrator(source, target, **options)
    with migrator.exclusive(30):
        migrator.run(None, follow=False, report_progress=lambda: None)
    return migrator
