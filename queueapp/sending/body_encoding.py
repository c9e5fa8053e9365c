"""Applies a queue's ``encoding`` (compression, encryption) to messages, as the last step before they are stored."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..errors import InvalidMessage
from ..messages import ENCRYPT_FOR
from ..messages.body_filters import sealing
from ..sql.message_columns import Outgoing, Run


def encode_body(queue: Any, message: Outgoing, using: str) -> Outgoing:
    """The message as the queue stores it in this database."""
    headers, seal = sealing(queue.delivery.encoding, message.headers, using)
    return message._replace(headers=headers, body=seal(message.body, message.id))


def encode_runs(queue: Any, runs: Iterable[Run], using: str) -> Iterator[Run]:
    """The runs as the queue stores them: the headers are read once, and one key is used, for each run."""
    for run in runs:
        headers, seal = sealing(queue.delivery.encoding, run.like.headers, using)
        bodies = [seal(body, uuid.UUID(bytes=one)) for one, body in zip(run.ids, run.bodies, strict=True)]
        yield Run(run.like._replace(headers=headers), run.ids, bodies)


def refuse_encryption_subject(queue: Any, headers: Mapping[str, str] | None) -> None:
    """Raise InvalidMessage for a message with an encryption subject on a queue that does not encrypt."""
    if headers and isinstance(headers, Mapping) and ENCRYPT_FOR in headers and not queue.delivery.encrypts:
        raise InvalidMessage(
            f"Header {ENCRYPT_FOR!r} is not accepted by {queue._meta.label}: nothing is encrypted there "
            "(Delivery.encoding)."
        )
