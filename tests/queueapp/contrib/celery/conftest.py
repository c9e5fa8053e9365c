"""What the tests of Celery's broker share: a database whose commits are real, and no threads that outlive a test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import kombu
import pytest

import queueapp.contrib.celery  # noqa: F401 - makes the URL known
from queueapp.contrib.celery.process_agent import stop_agents
from tests.databases import parametrize_alias
from tests.in_process_worker import real_commits

from .consuming import Consume

#: The apps whose tables a test may write to.
APPS = [*real_commits.kwargs["available_apps"], "queueapp.contrib.celery"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One case per database."""
    parametrize_alias(metafunc, APPS)


@pytest.fixture(autouse=True)
def no_agents() -> Iterator[None]:
    yield
    stop_agents()


@pytest.fixture
def conn(alias: str) -> Iterator[kombu.Connection]:
    with kombu.Connection(f"queueapp://{alias}") as conn:
        yield conn


@pytest.fixture
def consume(conn: Any) -> Consume:
    """Starts a consumer of queues; the messages that it has been handed."""

    def consume(*queues: str, prefetch: int | None = None, no_ack: bool = False) -> list[Any]:
        found: list[Any] = []
        channel = conn.channel()
        consumer = kombu.Consumer(
            channel,
            [kombu.Queue(name) for name in queues],
            on_message=found.append,
            prefetch_count=prefetch,
            no_ack=no_ack,
        )
        consumer.consume()
        return found

    return consume
