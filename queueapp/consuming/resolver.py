"""Consumers that are not registered one by one: a finder says who handles a message when the first of its type is met.

Django's tasks are such: every task is a consumer with options of its own, and a worker learns of one by its path. The
finder stands behind registered consumers (``Registration.finder``), by whose names messages are addressed and told of.
"""

from __future__ import annotations

import abc
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from .registration import Registration


class ConsumerResolver(abc.ABC):
    """Who handles the messages of one queue, and what is kept of those that were handled."""

    #: Whether there may be no other consumer.
    alone = False
    #: Whether it asks more of a message than its type: ``variant_of`` says what.
    varies = False

    @abc.abstractmethod
    def find(self, type_name: str, variant: str = "") -> Registration:
        """Who handles messages of this type, and of this variant. Raises UndecodableMessage where nobody ever will: then it
        becomes poison."""

    def variant_of(self, headers: str) -> str:
        """What tells this message from others of its type; asked only where it ``varies``."""
        return ""

    @abc.abstractmethod
    def ack(self, sql: Any, connection: Any, seqs: Sequence[int], token: uuid.UUID) -> int:
        """``QueueSql.acks.ack``, and in one transaction with it whatever is kept of these messages."""

    @abc.abstractmethod
    def try_ack(self, sql: Any, connection: Any, seqs: Sequence[int], token: uuid.UUID, wait_ms: int) -> list[int]:
        """``QueueSql.acks.try_ack``, in the same way. In a transaction of its own."""

    @abc.abstractmethod
    def run_maintenance(self, alias: str, may_continue: Callable[[], bool]) -> None:
        """Called now and then by who keeps house in a database, until ``may_continue`` says no: delete what is old."""
