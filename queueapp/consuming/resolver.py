"""``ConsumerResolver``: selects the consumer of a message where consumers are not registered one by one.

Django's tasks are such: every task is a consumer with its own options, and a worker finds it by its path. A resolver
belongs to a registered consumer (``Registration.finder``), whose name addresses its messages and is shown.
"""

from __future__ import annotations

import abc
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from .registration import Registration


class ConsumerResolver(abc.ABC):
    """Selects the consumers of one queue, and stores results of handled messages."""

    #: Whether the queue may have no other consumer.
    alone = False
    #: Whether the consumer depends on more than the type: see ``variant_of``.
    varies = False

    @abc.abstractmethod
    def find(self, type_name: str, variant: str = "") -> Registration:
        """The consumer of messages of this type and variant. Raises UndecodableMessage if there is none, so that the
        message becomes poison."""

    def variant_of(self, headers: str) -> str:
        """The part of the headers that selects among consumers of one type; called only if it ``varies``."""
        return ""

    @abc.abstractmethod
    def ack(self, sql: Any, connection: Any, seqs: Sequence[int], token: uuid.UUID) -> int:
        """``QueueSql.acks.ack``, and in the same transaction the results of these messages."""

    @abc.abstractmethod
    def try_ack(self, sql: Any, connection: Any, seqs: Sequence[int], token: uuid.UUID, wait_ms: int) -> list[int]:
        """``QueueSql.acks.try_ack``, in the same way. In a transaction of its own."""

    @abc.abstractmethod
    def run_maintenance(self, alias: str, may_continue: Callable[[], bool]) -> None:
        """Delete old results; called by the maintenance of a database, until ``may_continue`` returns False."""
