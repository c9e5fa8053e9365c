"""The options of sends, for type checkers: what ``Queue.send``, ``asend``, ``send_many`` and ``asend_many`` take by name.

Checked against the signatures and against ``sql.carried`` by the tests; nothing reads them while it runs.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any, TypedDict

from ..models.delivery import OnConflict


class CarriedOptions(TypedDict, total=False):
    """What a message carries without an argument of its own in ``send``."""

    is_barrier: bool


class BulkOptions(CarriedOptions, total=False):
    """What holds for all messages of a ``send_many``."""

    dedupe_key: str | Callable[[Any], str | None] | None
    on_conflict: OnConflict | str | None

    headers: Mapping[str, str] | None
    expires_in: timedelta | None
    priority: int
    recipient: str
    unknown_recipient: bool
    using: str | None


class SelectOptions(CarriedOptions, total=False):
    """What ``send_from`` takes beside the rows."""

    of: type | None
    headers: Mapping[str, str] | None
    expires_in: timedelta | None
    priority: int
    recipient: str
    unknown_recipient: bool
    using: str | None


class SendOptions(BulkOptions, total=False):
    """What ``send`` takes beside the body."""

    delay: timedelta | None
    at: datetime | None
    delayed_in: str | None
    correlation_id: str | None
    reply_to: str | None
    message_id: uuid.UUID | None
    isolated: bool
