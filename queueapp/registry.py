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


queues = Queues()
