"""The keyword arguments of ``Queue.send``, ``asend``, ``send_many`` and ``asend_many``, for type checkers.

Tests compare them with the signatures and with ``sql.message_columns``; no code reads them at run time.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any, TypedDict

from ..models.delivery import OnConflict


class CarriedOptions(TypedDict, total=False):
    """Message columns without a named argument in ``send``."""

    is_barrier: bool


class BulkOptions(CarriedOptions, total=False):
    """Arguments of ``send_many``, for all of its messages."""

    dedupe_key: str | Callable[[Any], str | None] | None
    on_conflict: OnConflict | str | None

    headers: Mapping[str, str] | None
    expires_in: timedelta | None
    priority: int
    recipient: str
    unknown_recipient: bool
    using: str | None


class SelectOptions(CarriedOptions, total=False):
    """Arguments of ``send_from`` beside the rows."""

    of: type | None
    headers: Mapping[str, str] | None
    expires_in: timedelta | None
    priority: int
    recipient: str
    unknown_recipient: bool
    using: str | None


class SendOptions(BulkOptions, total=False):
    """Arguments of ``send`` beside the body."""

    delay: timedelta | None
    at: datetime | None
    delayed_in: str | None
    correlation_id: str | None
    reply_to: str | None
    message_id: uuid.UUID | None
    isolated: bool
