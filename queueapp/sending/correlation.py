"""Correlation and causation headers of messages that a handler sends.

The model and, in its wire format, the names are those of NServiceBus: the *correlation id* is passed from message to
message and begins as the id of the first; *related to* is the id of the message being handled; a *conversation id* is
passed on if the message has one.
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
    """The headers with correlation headers of the handled message; a header that the sender has set is kept."""
    context = context_of(caller)
    if not settings.CORRELATE or not isinstance(context, Context):  # the message of a batch is unknown
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
        return headers  # not a dict: encoding raises the error
    return added | dict(own)
