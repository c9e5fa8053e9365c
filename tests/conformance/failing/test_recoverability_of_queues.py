"""What becomes of a failed message is said by its consumer, or else by its queue, or else by the project."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest

from queueapp import Discard
from queueapp.errors import InvalidOption
from queueapp.models.delivery import Delivery, given_options
from tests.conformance.endpoint import Endpoint, modes
from tests.in_process_worker import eventually
from workers.receiving.handlers import TimeLimitExceeded


def fail(*_: object) -> None:
    raise KeyError("so it is")


@pytest.fixture
def of_queue(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets options of the queue."""

    def options(**given: Any) -> None:
        for name, value in given.items():
            monkeypatch.setattr(endpoint.queue.delivery, name, value)

    return options


@modes("RS")
def test_the_queue_sets_the_number_of_attempts(endpoint: Endpoint, of_queue: Any) -> None:
    of_queue(attempts=2, retry_delay=timedelta(0))
    endpoint.handle(fail, policy=None, attempts=None)
    endpoint.send(1)
    endpoint.start()

    assert eventually(endpoint.poison.first).attempts == 2


@modes("RS")
def test_the_consumer_has_the_last_word(endpoint: Endpoint, of_queue: Any) -> None:
    of_queue(attempts=5, retry_delay=timedelta(days=1), unrecoverable=(KeyError,))
    endpoint.handle(fail, policy=None, attempts=3, retry_delay=0, unrecoverable=())
    endpoint.send(1)
    endpoint.start()

    assert eventually(endpoint.poison.first).attempts == 3


@modes("RS")
def test_the_queue_sets_the_unrecoverable_errors(endpoint: Endpoint, of_queue: Any) -> None:
    of_queue(unrecoverable=(LookupError,))
    endpoint.handle(fail, policy=None)
    endpoint.send(1)
    endpoint.start()

    assert eventually(endpoint.poison.first).attempts == 1


@modes("RS")
def test_the_queue_sets_the_retry_delay(endpoint: Endpoint, of_queue: Any) -> None:
    of_queue(retry_delay=timedelta(hours=5), retry_jitter=0.0, immediate_retries=1)
    endpoint.handle(fail, policy=None)
    endpoint.send(1)
    endpoint.start()

    eventually(endpoint.delayed.exists)
    assert len(endpoint.calls) == 2


@modes("NRS")
def test_the_queue_has_a_policy(endpoint: Endpoint, of_queue: Any) -> None:
    asked: list[str] = []

    def policy(failure: Any) -> Discard:
        asked.append(type(failure.exception).__name__)
        return Discard("not needed")

    of_queue(policy=policy)
    endpoint.handle(fail, policy=None)
    endpoint.send(1)
    endpoint.start()

    eventually(lambda: asked == ["KeyError"])
    endpoint.wait_until_empty()
    assert not endpoint.poison.exists()


@modes("RS")
def test_the_queue_has_a_time_limit(endpoint: Endpoint, of_queue: Any) -> None:
    of_queue(timeout=timedelta(milliseconds=200), attempts=1)
    endpoint.handle(lambda *_: [threading.Event().wait(0.01) for _ in range(3_000)] and None, policy=None)
    endpoint.send(1)
    endpoint.start()

    assert TimeLimitExceeded.__name__ in eventually(endpoint.poison.first).exception_type


def test_what_is_out_of_bounds_is_refused_and_names_the_queue() -> None:
    with pytest.raises(InvalidOption, match=r"shop\.Orders.*attempts.*0"):
        Delivery({"attempts": 0}, "shop.Orders.Delivery.")


def test_a_policy_may_be_written_in_the_class() -> None:
    class Options:
        @staticmethod
        def policy(failure: Any) -> Discard:
            return Discard("never")

    assert Delivery(given_options(Options), "").policy is Options.policy
