"""What a handler sends says what it came of: correlation and causation, in headers.

As NServiceBus does it, and under its names where the wire format is its own: the *correlation id* goes from message to message,
and begins as the id of the first; *related to* is the id of the message that was being handled; a *conversation id* is passed on
where the message brought one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .. import messages
from ..conf import settings
from ..consuming.context import Context
from ..consuming.current_message import context_of


def with_correlation(
    headers: Mapping[str, str] | None, correlation_id: str | None, caller: Any
) -> Mapping[str, str] | None:
    """Headers with those that say what a message comes of; what its sender says itself counts."""
    context = context_of(caller)
    if not settings.CORRELATE or not isinstance(context, Context):  # of a batch nobody knows which message it is
        return headers
    own = headers or {}
    try:
        told = {
            messages.CORRELATION_ID: correlation_id or context.correlation_id or str(context.message_id),
            messages.RELATED_TO: str(context.message_id),
            messages.CONVERSATION_ID: context.conversation_id,
        }
        added = {name: value for name, value in told.items() if value and messages.well_known(own, name) is None}
    except (AttributeError, TypeError):
        return headers  # no dict: said where headers are encoded
    return added | dict(own)
