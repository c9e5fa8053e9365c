"""What happened to a message, in order, and where the messages are that belong to it."""

from __future__ import annotations

import uuid
from datetime import datetime
from typing import Any

from django.http import HttpRequest
from django.urls import reverse
from django.utils.html import format_html
from django.utils.http import urlencode

from ..errors import UndecodableMessage
from ..failures.history import read_failures
from ..flow import workflow
from ..messages import CONVERSATION_ID, CORRELATION_ID, RELATED_TO, readable_headers, well_known
from ..messages.ids import time_of
from ..models import QueueControl
from .formatting import display, untrusted

#: Failed attempts that the timeline has, the last ones.
MAX_ATTEMPTS = 50
#: Times in the columns of a message, whatever its table, and what they mean.
_TIMES = (
    ("enqueued_at", "enqueued"),
    ("stored_at", "stored in the delayed table"),
    ("published_at", "published"),
    ("failed_at", "kept as poison"),
    ("archived_at", "archived or edited"),
    ("due", "due"),
    ("expires", "expires"),
)


def timeline(message: Any, identity: Any) -> list[tuple[Any, Any]]:
    """(time, what happened), the earliest first; what is still to come is at the end. Times of senders and workers are
    by their own clocks."""
    found: list[tuple[datetime, Any]] = []
    made = _made_at(identity)
    if made is not None:
        found.append((made, "created by its sender"))
    for name, text in _TIMES:
        at = getattr(message, name, None)
        if isinstance(at, datetime):
            found.append((at, text))
    if getattr(message, "lease_token", None) and isinstance(message.lease_expires, datetime):
        found.append((message.lease_expires, "its lease expires"))
    for entry in read_failures(getattr(message, "failures", None))[-MAX_ATTEMPTS:]:
        if isinstance(entry, dict) and (at := display.parsed_moment(entry.get("at"))) is not None:
            attempt = untrusted.inline(entry.get("attempt", ""), 10)
            error = untrusted.inline(entry.get("exception", ""), 160)
            found.append((at, format_html("attempt {} failed: {}", attempt, error)))
    return [(display.moment(at), text) for at, text in sorted(found, key=lambda event: event[0])]


def _made_at(identity: Any) -> datetime | None:
    """The time in the id of a message, where the id has one."""
    try:
        key = identity if isinstance(identity, uuid.UUID) else uuid.UUID(str(identity))
        return time_of(key) if key.version == 7 else None
    except (ValueError, OverflowError):
        return None


def related(page: Any, request: HttpRequest, message: Any, identity: Any) -> list[tuple[str, Any]]:
    """Facts that lead to the messages with the same correlation, to the one that caused this one, and to those that it
    caused: searches, as far as the user may search."""
    overview = page.admin_site._registry.get(QueueControl)
    if overview is None or not overview.has_view_permission(request):
        return []
    headers = readable_headers(message.start_of_headers)
    correlation = getattr(message, "correlation_id", None) or well_known(headers, CORRELATION_ID)
    facts = []
    if correlation:
        facts.append(("Same correlation", _search(page, f"correlation:{_quoted(correlation)}", correlation)))
    if conversation := well_known(headers, CONVERSATION_ID):
        facts.append(("Same conversation", _search(page, f"correlation:{_quoted(conversation)}", conversation)))
    if cause := well_known(headers, RELATED_TO):
        facts.append(("Caused by", _search(page, f"id:{_quoted(cause)}", cause)))
    if following := _following(message.start_of_headers):
        facts.append(("Followed by", untrusted.inline(following, 500)))
    facts.append(("Caused", _search(page, f"header:{RELATED_TO}={identity}", "what its handler sent")))
    return facts


def _following(headers: str) -> str:
    """The queues of the messages that follow this one; '' where none does, or the header cannot be read."""
    try:
        return ", ".join(message.queue for message in workflow.read(headers).then)
    except UndecodableMessage:
        return ""


def _quoted(text: Any) -> str:
    plain = str(text).replace('"', "")
    return f'"{plain}"' if " " in plain else plain


def _search(page: Any, query: str, text: Any) -> Any:
    url = reverse(f"{page.admin_site.name}:queueapp_queuecontrol_search")
    return format_html('<a href="{}?{}">{}</a>', url, urlencode({"q": query}), untrusted.inline(text, 60))
