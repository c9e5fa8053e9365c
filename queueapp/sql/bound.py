"""The verb of a broker whose queues are recipients of one table: a message for all that are bound to an exchange."""

from __future__ import annotations

import abc
from typing import Any, NamedTuple

from .outgoing import Outgoing


class BrokerTables(NamedTuple):
    """The tables of the models ``kombu.broker.DeclaredQueue`` and ``kombu.broker.Binding``."""

    queues: str
    bindings: str


class Bound(abc.ABC):
    """Part of ``QueueSql``, for tables with recipients and levels."""

    @abc.abstractmethod
    def insert_bound(
        self, connection: Any, tables: BrokerTables, message: Outgoing, exchange: str, routing_key: str | None
    ) -> int:
        """Store a copy of a message for each declared queue that is bound to the exchange, by this key (None: by any), and whose
        time is not over; returns how many. A queue's own limit on how long messages wait holds where it is the shorter one."""
