"""Messages about to be stored: one, or a run of many that differ in little."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, islice
from typing import NamedTuple


class Outgoing(NamedTuple):
    """A message about to be stored."""

    id: uuid.UUID
    headers: str
    body: bytes | None
    expires_ms: int | None = None
    recipient: str = ""
    priority: int = 0
    correlation_id: str | None = None
    reply_to_address: str | None = None
    is_barrier: bool = False


#: The attributes after id, headers and body, and what a message says that has nothing to say about them.
OPTIONS = ("expires", "recipient", "priority", "correlation_id", "reply_to_address", "is_barrier")
NO_OPTIONS = (None, "", 0, None, None, False)

#: Most messages of one run.
RUN_LENGTH = 250


class Run(NamedTuple):
    """Messages in the order in which they are to be stored, that differ in id (16 bytes each) and body only. All else is
    as in ``like``, whose own id and body say nothing."""

    like: Outgoing
    ids: Sequence[bytes]
    bodies: Sequence[bytes | None]


def runs_of(messages: Iterable[Outgoing]) -> Iterator[Run]:
    """Any messages as runs."""
    for _, group in groupby(messages, lambda message: (message.headers, message[3:])):
        while some := list(islice(group, RUN_LENGTH)):
            yield Run(some[0], [message.id.bytes for message in some], [message.body for message in some])
