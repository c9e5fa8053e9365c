"""Which queues exist in this process, found by label (``app.Model``) or by table.

Historical models of migrations do not use the metaclass, so only real queues are here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .errors import QueueNotFound


class Queues:
    """The queues of this process, in the order in which their classes were made."""

    def __init__(self) -> None:
        self._by_label: dict[str, Any] = {}

    def add(self, queue: Any) -> None:
        """Register a queue class; a class made again under the same label (tests, reloads) replaces the old one."""
        self._by_label[queue._meta.label] = queue

    def __iter__(self) -> Iterator[Any]:
        return iter(list(self._by_label.values()))

    def find(self, name: str) -> Any:
        """The queue with this label, case-insensitively, or with this table. Raises QueueNotFound.

        >>> queues.find("flights.FlightDelays") is queues.find("flight_delays")
        """
        if name in self._by_label:
            return self._by_label[name]
        lower = name.lower()
        for queue in self._by_label.values():
            if queue._meta.label_lower == lower or queue._meta.db_table == name:
                return queue
        raise QueueNotFound(name, self._by_label)

    def find_addressed(self, name: str) -> tuple[Any, str]:
        """The queue of a destination, and the database that it lies in where the destination names one (``address``), else ''.
        Raises QueueNotFound."""
        try:
            return self.find(name), ""
        except QueueNotFound:
            label, _, alias = name.rpartition("@")
            if not label:
                raise
        try:
            return self.find(label), alias
        except QueueNotFound:
            raise QueueNotFound(name, self._by_label) from None


def address(queue: Any, alias: str) -> str:
    """The destination of a message that is kept in another database than its queue's. No queue answers to it there, so who
    does not know of such messages leaves them alone.

    >>> address(Shipments, "warehouse")
    'shop.Shipments@warehouse'
    """
    return f"{queue._meta.label}@{alias}"


queues = Queues()
