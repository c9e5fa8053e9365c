"""Bodies on a page as their senders wrote them: decompressed, and decrypted for users with ``queueapp.decrypt_body``.

If a body cannot be read, the page shows the stored bytes and the reason. It never shows a key, nor its subject.
"""

from __future__ import annotations

import uuid
from typing import Any, NamedTuple

from django.db import Error
from django.http import HttpRequest

from ..errors import QueueError, UndecodableMessage
from ..messages import decode_headers, read_head
from ..messages.body_filters import innermost, is_secret, is_wrapped, opened
from ..sql import nonblocking
from .formatting import display

#: Bytes of the largest stored body that a page decodes.
LARGEST = 512 * 1024
DECRYPT = "queueapp.decrypt_body"


class Read(NamedTuple):
    """A body as it was sent, or as it is stored (``note`` says why), and its size."""

    body: bytes | None
    size: int | None
    note: str


def content_type_of(headers: str | None) -> str:
    """The content type of the headers; '' without one, or if they do not parse."""
    try:
        return read_head(headers or "")[1]
    except UndecodableMessage:
        return ""


def editable_body(request: HttpRequest, message: Any) -> bytes | None:
    """The body of a poison message for the edit form; None if this user cannot edit it."""
    if message.body is None:
        return None
    body, content_type = bytes(message.body), content_type_of(message.headers)
    if not is_wrapped(content_type):
        return body
    if len(body) > LARGEST or (is_secret(content_type) and not may_decrypt(request)):
        return None
    try:
        return opened(body, content_type, decode_headers(message.headers), message.message_id, message._state.db)[0]
    except (QueueError, Error):
        return None


def may_decrypt(request: HttpRequest) -> bool:
    """Whether this user may read encrypted bodies."""
    return bool(request.user.has_perm(DECRYPT))


def read(request: HttpRequest, page: Any, message: Any, start: bytes | None) -> Read | None:
    """The body of a compressed or encrypted message; None for a plain one. ``start``: the bytes that the page has
    fetched."""
    content_type = content_type_of(message.start_of_headers)
    if not is_wrapped(content_type) or start is None:
        return None

    def stored(why: str) -> Read:
        return Read(start, message.size, f"Shown as it is stored: {why}.")

    if is_secret(content_type) and not may_decrypt(request):
        return stored("it is encrypted, and you lack the permission to read such bodies")
    if (message.size or 0) > LARGEST:
        return stored(f"it is longer than {display.size(LARGEST)}")
    alias = message._state.db
    rows = nonblocking(page.model._base_manager.using(alias)).filter(pk=message.pk)
    row = rows.values_list("headers", "body", page.id_field).first()
    if row is None:
        return stored("it is gone")
    headers, body, identity = row
    try:
        plain, _ = opened(bytes(body), content_type, decode_headers(headers), uuid.UUID(str(identity)), alias)
    except (QueueError, Error) as error:
        return stored(f"it cannot be read ({str(error).rstrip('.')})")
    how = "decrypted" if is_secret(content_type) else "decompressed"
    note = (
        f"{how.capitalize()} for this page from {content_type}, {display.size(message.size)} as stored; it is "
        f"{innermost(content_type)}."
    )
    return Read(plain, None if plain is None else len(plain), note)
