"""What third parties derive from, wrongly: both type checkers have to find each line that says so, and no other."""

from __future__ import annotations

import uuid
from datetime import datetime, timedelta
from typing import Any

from queueapp import Consumer, Context, DeliveryOptions, Failure, Poison, Queue, Semantics, consumer
from queueapp.delayed import Delayed, DelayedStore, DelayedStoreWithInfrastructure
from tests.typing.example.extending import Memory
from tests.typing.example.models import Orders, Placed


def as_text(failure: Failure) -> str:
    return failure.exception  # wrong


def no_verdict(failure: Failure) -> bool:
    return True


def too_many(failure: Failure, more: int) -> Poison:
    return Poison("no")


class Typed(Queue):
    class Meta:
        app_label = "example"

    class Delivery(DeliveryOptions):
        semantics = "transactional"  # wrong
        lease_period = 30  # wrong
        priorities = "three"  # wrong
        unrecoverable = KeyError  # wrong
        policy = staticmethod(no_verdict)  # wrong

    @classmethod
    def send_many(cls, bodies: int) -> int:  # wrong
        return bodies


class WithAString(Consumer[Placed]):
    queue = "example.Orders"  # wrong
    attempts = "3"  # wrong
    retry_delay = "soon"  # wrong

    def handle(self, message: Placed, context: Context) -> None: ...


class OfAnother(Consumer[Placed]):
    queue = Orders

    def handle(self, message: str, context: Context) -> None: ...  # wrong


class OfThree(Consumer[Placed]):
    queue = Orders

    def handle(self, message: Placed, context: Context, more: int) -> None: ...  # wrong


class WithoutContext(Consumer[Placed]):
    queue = Orders

    def handle(self, message: Placed) -> None: ...  # wrong


consumer(Orders, policy=no_verdict)  # wrong
consumer(Orders, policy=too_many)  # wrong
consumer(Orders, unrecoverable=KeyError)  # wrong


class Misspelt(Memory):
    def initialize(self, endpoint: str) -> None: ...  # wrong

    def store(self, message: str) -> None: ...  # wrong

    def fetch_next_due(self, at: datetime) -> str:  # wrong
        return ""

    def next(self) -> timedelta:  # wrong
        return timedelta()

    def cancel(self, message_id: int) -> int:  # wrong
        return 0

    def reschedule(self, message_id: uuid.UUID) -> int:  # wrong
        return 0

    def count(self, destination: str, limit: int) -> str:  # wrong
        return ""


class HalfDone(DelayedStore):
    def initialize(self, endpoint: str, semantics: Semantics) -> None: ...

    def store(self, message: Delayed) -> None:
        number: int = message.due  # wrong
        print(number)


class NotSetUp(Memory, DelayedStoreWithInfrastructure): ...


def use(store: DelayedStore, anything: Any) -> None:
    HalfDone("default")  # wrong
    NotSetUp("default")  # wrong
    Memory()  # wrong
    store.reschedule(anything)  # wrong
