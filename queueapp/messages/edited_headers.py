"""Headers of the mended copy of a poison message: what may be changed in them, and whose copy it is."""

from __future__ import annotations

import uuid
from collections.abc import Mapping

from ..errors import InvalidMessage, UndecodableMessage
from .header_names import ATTEMPTS, CORRELATION_ID, DIED, EDIT_OF, ENCRYPTION_KEY, NSB_CORRELATION_ID, NSB_MESSAGE_ID
from .headers import decode_headers, encode_headers

#: What says who a message is, what it belongs to and what happened to it; whole names, and beginnings of names.
_LOCKED = frozenset(
    {
        CORRELATION_ID,
        EDIT_OF,
        ENCRYPTION_KEY,
        ATTEMPTS,
        DIED,
        NSB_MESSAGE_ID,
        NSB_CORRELATION_ID,
        "NServiceBus.ConversationId",
    }
    | {"NServiceBus.RelatedTo", "NServiceBus.MessageIntent", "NServiceBus.FailedQ", "NServiceBus.TimeOfFailure"}
)

_LOCKED_BEGINNINGS = (
    "NServiceBus.Saga", "NServiceBus.OriginatingSaga", "NServiceBus.Retries", "NServiceBus.ExceptionInfo.",
    "NServiceBus.DelayedRetries", "ServiceControl.EditOf",
)  # fmt: skip


def edited_headers(before: str, after: Mapping[str, str] | None, original: uuid.UUID, identity: uuid.UUID) -> str:
    """Stored headers of the edited copy ``identity`` of a message: ``after`` in place of ``before`` (None: the same),
    linked to the original. Raises InvalidMessage where one was changed, added or taken out that is locked: ids,
    correlation, conversation, saga, intent, retries and faults."""
    try:
        old = decode_headers(before)
    except UndecodableMessage as error:
        if after is None:
            raise InvalidMessage(f"{error} Give the edited message headers of its own.") from error
        old = {}
    new = dict(old if after is None else after)
    for name in sorted(old.keys() | new.keys()):
        locked = name in _LOCKED or name.startswith(_LOCKED_BEGINNINGS)
        if locked and old.get(name) != new.get(name):
            raise InvalidMessage(f"Header {name!r} is locked: an edited message keeps it as it was.")
    new[EDIT_OF] = str(original)
    if NSB_MESSAGE_ID in new:
        new[NSB_MESSAGE_ID] = str(identity)
    return encode_headers(new)


def edit_of(headers: str) -> uuid.UUID | None:
    """The message that this one was edited from; None when it was not, or the headers do not parse."""
    if EDIT_OF not in headers:
        return None
    try:
        return uuid.UUID(decode_headers(headers).get(EDIT_OF, ""))
    except (UndecodableMessage, ValueError):
        return None
