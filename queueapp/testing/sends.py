"""The messages that were sent, read from the tables: rolled-back sends are not there, and the sending code needs no
mock."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from django.db import connections

from .. import messages
from ..errors import QueueNotFound, UndecodableMessage
from ..inline import Outcome
from ..models import DelayedMessage
from ..models.delivery.topics import content_type_of
from ..registry import queues
from ..sending.validation import alias_of


@dataclasses.dataclass(frozen=True, slots=True)
class Sent:
    """One message that was sent."""

    queue: Any
    message_id: uuid.UUID
    headers: Mapping[str, str]
    raw_body: bytes | None
    recipient: str = ""
    #: It waits in the delayed store.
    delayed: bool = False

    @property
    def body(self) -> Any:
        """Plain JSON values, or bytes."""
        return self.decode()

    @property
    def message_type(self) -> str:
        """The name of its type; '' for a message without one."""
        return messages.well_known(self.headers, messages.TYPE) or ""

    def decode(self, cls: Any = Any) -> Any:
        """The body as an instance of ``cls``. Raises UndecodableMessage."""
        stored, default_type = messages.encode_headers(self.headers), content_type_of(self.queue)
        return messages.read_stored(self.raw_body, stored, self.message_id, alias_of(self.queue), cls, default_type)

    def is_like(self, expected: Any) -> bool:
        """Whether it is what a test expects: a body (compared with what is stored, read as its class), the class of a
        typed one, or a function of this object."""
        try:
            if isinstance(expected, type):
                return messages.is_typed(expected) and self.message_type == messages.type_name(expected)
            cls: Any = type(expected)
            if messages.is_typed(cls):
                return self.message_type == messages.type_name(cls) and bool(self.decode(cls) == expected)
            if callable(expected):
                return bool(expected(self))
            return bool(self.body == expected)
        except UndecodableMessage:
            return False

    def __str__(self) -> str:
        shown = repr(self.raw_body)[1:]
        kind = f"{self.message_type} " if self.message_type else ""
        return f"{self.queue._meta.label}: {kind}{shown[:300]}{' (delayed)' if self.delayed else ''}"


def waiting(only: Iterable[Any] = ()) -> Iterator[Sent]:
    """What is in the tables of these queues (default: of all that are managed) and, for them, in the delayed store."""
    wanted = list(only) or [queue for queue in queues if queue._meta.managed]
    by_alias: dict[str, list[Any]] = {}
    for queue in wanted:
        by_alias.setdefault(alias_of(queue), []).append(queue)
    for alias, alias_queues in by_alias.items():
        try:
            there = set(connections[alias].introspection.table_names())
        except AssertionError:  # Django's, of a database that the test case does not name
            continue
        for queue in alias_queues:
            # A model of the test's own may have no table; to ask it would break the test's transaction.
            if queue._meta.db_table in there:
                names = [
                    local_field.name for local_field in queue._meta.local_fields if local_field.name == "recipient"
                ]
                for key, headers, body, *rest in (
                    queue.objects.using(alias).order_by("seq").values_list("id", "headers", "body", *names)
                ):
                    yield Sent(queue, messages.as_uuid(key), messages.readable_headers(headers), _bytes(body), *rest)
        if DelayedMessage._meta.db_table in there:
            for row in DelayedMessage.objects.using(alias).order_by("number"):
                queue = _of(row.destination)
                if queue in alias_queues:
                    yield Sent(
                        queue,
                        row.message_id,
                        messages.readable_headers(row.headers),
                        _bytes(row.body),
                        row.recipient,
                        delayed=True,
                    )


def taken(outcome: Outcome) -> Sent:
    """One that was handled meanwhile."""
    return Sent(outcome.queue, outcome.message_id, outcome.headers, outcome.body, outcome.recipient)


def _of(destination: str) -> Any:
    try:
        return queues.find_addressed(destination)[0]
    except QueueNotFound:
        return None


def _bytes(body: Any) -> bytes | None:
    return None if body is None else bytes(body)
