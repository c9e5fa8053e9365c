"""Which queues exist in this process, found by label (``app.Model``) or by table.

Historical models of migrations do not use the metaclass, so only real queues are here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .errors import QueueNotFound


class Queues:
    """The queues of this process, in the order in which their classes were made."""

    def __init__(self) -> None:
        self._by_label: dict[str, Any] = {}
        self._made = 0

    def add(self, queue: Any) -> None:
        """Register a queue class; a class made again under the same label (tests, reloads) replaces the old one."""
        self._by_label[queue._meta.label] = queue
        self._made += 1

    def remove(self, queue: Any) -> None:
        """Forget a queue (tests)."""
        del self._by_label[queue._meta.label]
        self._made += 1

    @contextmanager
    def isolated(self, *queues: Any) -> Iterator[None]:
        """Within the block only these queues and those that it makes; afterwards those of before (tests)."""
        before, self._by_label = self._by_label, {queue._meta.label: queue for queue in queues}
        self._made += 1
        try:
            yield
        finally:
            self._by_label = before
            self._made += 1

    @property
    def version(self) -> tuple[int, int]:
        """Another one after each change: what was derived from the queues before is stale."""
        return self._made, len(self._by_label)

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

    def is_foreign(self, table: str) -> bool:
        """Whether this is the table of a foreign queue, which no migration of ours creates."""
        return any(queue._meta.db_table == table and not queue._meta.managed for queue in self)

    def find_by_address(self, address: str) -> Any:
        """The queue that an address for answers names: a label, a table, or the table as NServiceBus' transports write
        it, with schema and catalog behind it. Raises QueueNotFound.

        >>> queues.find_by_address("Billing@[dbo]@[shop]") is queues.find("Billing")
        """
        try:
            return self.find(address)
        except QueueNotFound:
            table, *where = _parts(address) or [""]
            schema = where[0] if where else ""
            names = [f'{schema}"."{table}', f"{schema}.{table}", table] if schema else [table]
            for name in names:
                try:
                    return self.find(name)
                except QueueNotFound:
                    continue
            raise QueueNotFound(address, self._by_label) from None

    def find_addressed(self, name: str) -> tuple[Any, str]:
        """The queue of a destination, and the database that it lies in where the destination names one (``address``),
        else ''. Raises QueueNotFound."""
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


def _parts(address: str) -> list[str]:
    """Table, schema and catalog of an address: ``table@[schema]@[catalog]``, or PostgreSQL's ``"schema"."table"``;
    quoted names may hold anything."""
    if match := _DOTTED.fullmatch(address.strip()):
        schema, table = match.groups()
        return [_bare(table), _bare(schema)] if schema else [_bare(table)]
    return [_bare(part) for part in _PART.findall(address.strip()) if part]


_NAME = r"(?:\[(?:[^\]]|\]\])*\]|\"(?:[^\"]|\"\")*\"|[^@.]+)"
_DOTTED = re.compile(rf"(?:({_NAME})\.)?({_NAME})")
_PART = re.compile(r"\[(?:[^\]]|\]\])*\]|\"(?:[^\"]|\"\")*\"|[^@]+")


def _bare(name: str) -> str:
    if len(name) > 1 and name[0] == "[" and name[-1] == "]":
        return name[1:-1].replace("]]", "]")
    if len(name) > 1 and name[0] == name[-1] == '"':
        return name[1:-1].replace('""', '"')
    return name


def address(queue: Any, alias: str) -> str:
    """The destination of a message that is kept in another database than its queue's. No queue answers to it there, so
    who does not know of such messages leaves them alone.

    >>> address(Shipments, "warehouse")
    'shop.Shipments@warehouse'
    """
    return f"{queue._meta.label}@{alias}"


queues = Queues()
