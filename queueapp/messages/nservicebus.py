"""Headers under the names of the NServiceBus wire format, for tables that its endpoints read."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime

from .header_names import BASE_TYPES, NSB_CORRELATION_ID, NSB_MESSAGE_ID, NSB_TIME, NSB_TIME_SENT, TO_NSB, TYPE
from .headers import decode_headers, encode_headers


def to_nservicebus(headers: str, identity: uuid.UUID) -> str:
    """Stored headers under the names of NServiceBus' wire format, with its message id and time sent."""
    ours = decode_headers(headers)
    bases = ours.pop(BASE_TYPES, "")
    if bases and TYPE in ours:
        ours[TYPE] += f"; {bases}"
    theirs = {TO_NSB.get(name, name): value for name, value in ours.items()}
    theirs.setdefault(NSB_MESSAGE_ID, str(identity))
    theirs.setdefault(NSB_CORRELATION_ID, theirs[NSB_MESSAGE_ID])
    theirs.setdefault(NSB_TIME_SENT, datetime.now(UTC).strftime(NSB_TIME))
    return encode_headers(theirs)
