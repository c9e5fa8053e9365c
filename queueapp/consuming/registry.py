"""Which consumer of this process handles what: by queue, type and name."""

from __future__ import annotations

import threading
from typing import Any

from ..errors import InvalidOption
from ..registry import queues
from .registration import Registration


class Registry:
    """The consumers of this process by queue, type and name."""

    def __init__(self) -> None:
        self._by_queue: dict[str, dict[str, Registration]] = {}
        self._lock = threading.Lock()

    def add(self, registration: Registration) -> None:
        label = registration.queue._meta.label
        with self._lock:
            own = self._by_queue.setdefault(label, {})
            if not registration.queue.delivery.recipients:
                for other in own.values():
                    if other.type_name == registration.type_name and other.name != registration.name:
                        raise InvalidOption(
                            f"@consumer {registration.name}",
                            registration.type_name or "messages without a type",
                            f"handled once in {label}, where {other.name} handles it already "
                            "(set Delivery.recipients = True to give each consumer a copy)",
                        )
            own[registration.name] = registration

    def remove(self, name: str) -> None:
        """Forget a consumer (tests)."""
        with self._lock:
            for own in self._by_queue.values():
                own.pop(name, None)

    def of(self, queue: Any) -> list[Registration]:
        """The consumers of a queue in the order of registration."""
        return list(self._by_queue.get(queue._meta.label, {}).values())

    def find(self, queue: Any, type_name: str, recipient: str) -> Registration | None:
        """Who handles a message of this type addressed to ``recipient``; None: nobody in this process."""
        own = self._by_queue.get(queue._meta.label)
        if own is None:
            return None
        if recipient:
            return own.get(recipient)
        return next((c for c in own.values() if c.type_name == type_name), None)

    def queues(self) -> list[Any]:
        """The queues that have a consumer in this process."""
        return [queues.find(label) for label, own in self._by_queue.items() if own]


#: The consumers of this process.
registered = Registry()


def recipients_of(queue: Any, type_name: str) -> tuple[str, ...]:
    """The names of all consumers of a type on a queue with ``recipients``; ('',) when this process knows none."""
    return tuple(c.name for c in registered.of(queue) if c.type_name == type_name) or ("",)
