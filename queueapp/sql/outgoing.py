"""Messages about to be stored: one, or a run of many that differ in little."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, islice
from typing import Any, NamedTuple

from .carried import SENT, Kind, tuple_class

#: The attributes after id, headers and body, and what a message says that has nothing to say about them.
OPTIONS = tuple(one.name for one in SENT)
NO_OPTIONS = tuple(one.default for one in SENT)
#: Those that are a duration here and a time where they are stored.
TIMES = tuple(one.name for one in SENT if one.kind is Kind.TIME)

_outgoing: Any = tuple_class(("id", "headers", "body", *(one.outgoing for one in SENT)), NO_OPTIONS)


class Outgoing(_outgoing):  # type: ignore[misc]
    """A message about to be stored: id, headers, body, then what ``carried`` declares, in that order: ``expires_ms``,
    ``recipient``, ``priority`` ..."""

    __slots__ = ()

    id: uuid.UUID
    headers: str
    body: bytes | None
    expires_ms: int | None


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
