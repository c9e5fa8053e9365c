"""The consumers of this process, by queue, type and name."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from .. import messages
from ..errors import InvalidOption
from ..registry import queues
from .registration import Registration


def is_alone(registration: Registration) -> bool:
    """Whether it handles all messages of its queue: a set consumer."""
    return registration.finder is not None and registration.finder.alone


class Registry:
    """The consumers of this process by queue, type and name."""

    def __init__(self) -> None:
        self._by_queue: dict[str, dict[str, Registration]] = {}
        self._lock = threading.Lock()

    def add(self, registration: Registration) -> None:
        label = registration.queue._meta.label
        with self._lock:
            registrations = self._by_queue.setdefault(label, {})
            if not registration.queue.delivery.recipients and registration.finder is None:
                for registered in registrations.values():
                    same = set(registered.type_names) & set(registration.type_names)
                    if same and registered.name != registration.name:
                        raise InvalidOption(
                            f"@consumer {registration.name}",
                            min(same) or "messages without a type",
                            f"handled once in {label}, where {registered.name} handles it already "
                            "(set Delivery.recipients = True to give each consumer a copy)",
                        )
            for registered in registrations.values():
                if registered.name == registration.name:
                    continue
                if is_alone(registered) or is_alone(registration):
                    accepted = (
                        f"the only consumer of {label}: a set consumer takes all of its messages, and "
                        f"{registered.name} is there"
                    )
                    raise InvalidOption(f"@consumer {registration.name}", label, accepted)
                both = {registered.name, *registered.aliases} & {registration.name, *registration.aliases}
                if both:
                    accepted = f"a name of one consumer of {label}, and {registered.name} has it or had it"
                    raise InvalidOption(f"@consumer {registration.name}", min(both), accepted)
            registrations[registration.name] = registration

    def remove(self, name: str) -> None:
        """Forget a consumer (tests)."""
        with self._lock:
            for registrations in self._by_queue.values():
                registrations.pop(name, None)

    @contextmanager
    def isolated(self) -> Iterator[None]:
        """Within the block only the consumers that it registers; afterwards those of before (tests)."""
        before, self._by_queue = self._by_queue, {}
        try:
            yield
        finally:
            self._by_queue = before

    def of(self, queue: Any) -> list[Registration]:
        """The consumers of a queue in the order of registration."""
        return list(self._by_queue.get(queue._meta.label, {}).values())

    def resolver_of(self, queue: Any) -> Any:
        """The ``resolver.ConsumerResolver`` of a queue whose consumers are not registered one by one; else None."""
        return next((registration.finder for registration in self.of(queue) if registration.finder is not None), None)

    def find(self, queue: Any, kind: messages.Kind, recipient: str, headers: str = "") -> Registration | None:
        """The consumer of a message of this kind addressed to ``recipient``; None: this process has none. Raises
        UndecodableMessage if a resolver knows that none exists."""
        finder = self.resolver_of(queue)
        if finder is not None:
            found: Registration = finder.find(kind.names[0], finder.variant_of(headers))
            return found
        registrations = self.of(queue)
        if recipient:
            return next(
                (
                    registration
                    for registration in registrations
                    if recipient == registration.name or recipient in registration.aliases
                ),
                None,
            )
        return next(iter(matching_consumers(registrations, kind.names)), None)

    def queues(self) -> list[Any]:
        """The queues that have a consumer in this process."""
        return [queues.find(label) for label, registrations in self._by_queue.items() if registrations]


#: The consumers of this process.
registered = Registry()


def matching_consumers(registrations: Iterable[Registration], names: Sequence[str]) -> list[Registration]:
    """The consumers of a type and of its bases (``Kind.names``): those of the type first, then those of the nearest
    base."""
    candidates = list(registrations)
    found = {
        registration.name: registration
        for name in with_bases(candidates, names)
        for registration in candidates
        if name in registration.type_names
    }
    return list(found.values())


def with_bases(registrations: Iterable[Registration], names: Sequence[str]) -> Sequence[str]:
    """The names of a type and of its bases; the headers may lack the bases."""
    if len(names) == 1 and names[0]:
        # The sender is older than its consumers, or another system; a class of this process may have bases.
        return next(
            (messages.type_names(cls) for registration in registrations if (cls := registration.knows(names[0]))), names
        )
    return names


def recipients_of(queue: Any, names: Sequence[str]) -> tuple[str, ...]:
    """The names of all consumers of a type, and of its bases, on a queue with ``recipients``; ('',) if this process
    knows none."""
    return tuple(consumer.name for consumer in matching_consumers(registered.of(queue), names)) or ("",)
