"""What third parties derive from, rightly: neither type checker may find anything here."""

from __future__ import annotations

import uuid
from datetime import datetime, timedelta
from typing import Any, assert_type

from queueapp import (
    Consumer,
    Context,
    DeliveryOptions,
    Discard,
    Failure,
    ForeignQueue,
    Poison,
    Queue,
    RetryLater,
    RetryNow,
    Semantics,
    consumer,
)
from queueapp.delayed import Delayed, DelayedStore, DelayedStoreWithInfrastructure
from tests.typing.example.models import Placed


def by_hand(failure: Failure) -> RetryNow | RetryLater | Poison | Discard:
    assert_type(failure.attempt, int)
    assert_type(failure.headers, dict[str, str])
    if isinstance(failure.exception, KeyError):
        return Discard("known")
    return RetryLater(timedelta(seconds=failure.attempt)) if failure.attempt < 3 else Poison("too often")


class Typed(Queue):
    """A queue whose options are checked."""

    class Meta:
        app_label = "example"

    class Delivery(DeliveryOptions):
        semantics = Semantics.AT_LEAST_ONCE
        lease_period = timedelta(minutes=1)
        priorities = 3
        concurrency = None
        timeout = 5
        retry_delay = timedelta(seconds=1)
        unrecoverable = (KeyError, ValueError)
        policy = staticmethod(by_hand)

    @classmethod
    def urgent(cls, body: Any) -> uuid.UUID:
        return cls.send(body, priority=2)


class Billing(ForeignQueue):
    class Meta:
        app_label = "example"
        db_table = "billing"

    class Delivery(DeliveryOptions):
        semantics = Semantics.AT_MOST_ONCE


class Base(Consumer[Placed]):
    """What some consumers have in common."""

    attempts = 3
    retry_delay = 2.5
    unrecoverable = (KeyError,)


class Ship(Base):
    queue = Typed
    name = "ship"
    timeout = timedelta(seconds=5)

    @staticmethod
    def policy(failure: Failure) -> Poison | RetryNow:
        return Poison("no") if failure.attempt > 2 else RetryNow()

    def handle(self, message: Placed, context: Context) -> None:
        assert_type(message.number, int)


class Bill(Consumer[Placed]):
    queue = Typed

    async def handle(self, message: Placed, context: Context) -> None:
        assert_type(context.attempt, int)


@consumer(Typed, policy=by_hand, unrecoverable=None)
def count(message: dict[str, int]) -> None: ...


class Memory(DelayedStore):
    """All that a store must have, and the verbs that it may."""

    def __init__(self, alias: str) -> None:
        super().__init__(alias)
        self._kept: dict[uuid.UUID, Delayed] = {}

    def initialize(self, endpoint: str, semantics: Semantics) -> None:
        if semantics is Semantics.TRANSACTIONAL:
            raise NotImplementedError

    def store(self, message: Delayed) -> None:
        assert_type(message.message_id, uuid.UUID)
        assert_type(message.due, datetime)
        self._kept[message.message_id] = message

    def fetch_next_due(self, at: datetime) -> Delayed | None:
        return next((item for item in self._kept.values() if item.due <= at), None)

    def remove(self, message: Delayed) -> bool:
        return self._kept.pop(message.message_id, None) is not None

    def increment_failure_count(self, message: Delayed) -> bool:
        return message.message_id in self._kept

    def next(self) -> datetime | None:
        return min((item.due for item in self._kept.values()), default=None)

    def cancel(self, message_id: uuid.UUID) -> int:
        return int(self._kept.pop(message_id, None) is not None)

    def reschedule(self, message_id: uuid.UUID, due: datetime) -> int:
        return 0

    def count(self, destination: str, limit: int) -> int:
        return min(limit, len(self._kept))


class Prepared(Memory, DelayedStoreWithInfrastructure):
    def setup_infrastructure(self) -> None: ...


def use(store: DelayedStore) -> int:
    assert_type(Delayed.from_json(b"{}"), Delayed)
    return store.cancel(uuid.uuid4())


use(Memory("default"))
use(Prepared("default"))
