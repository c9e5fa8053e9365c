"""The results of messages that were sent with ``keep_result``, the newest first. All texts are untrusted."""

from __future__ import annotations

import uuid
from typing import Any

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.safestring import SafeString

from ..errors import QueueError
from ..messages import read_kind
from ..messages.body_filters import decompressed, is_secret
from ..models import MessageResult, Now, UtcField
from ..sql import nonblocking
from .databases import DatabaseFilter
from .formatting import display, untrusted
from .large_tables.lists import Start
from .message_pages import may_view
from .read_only import ResultsAdmin


class MessageResultAdmin(ResultsAdmin):
    """One row per message."""

    title = "Message results"
    list_order = "-id"
    list_display = ("outcome", "message", "finished", "attempts")
    list_display_links = ("outcome",)
    list_filter = (DatabaseFilter,)
    ordering = ("-id",)
    search_help_text = "The id of a message."
    readonly_fields = ("outcome", "message", "started", "finished", "expires", "attempts", "returned", "raised")
    fields = readonly_fields

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        rows = nonblocking(super().get_queryset(request))
        # A deferred column is read by a statement of its own, for each row that shows it.
        added = {"db_now": Now(output_field=UtcField()), "start_of_error": Start("error", 1)}
        return rows.defer("headers", "body", "error").annotate(**added)

    def is_key(self, value: str) -> bool:
        return _id_of(value) is not None

    def get_search_results(self, request: HttpRequest, queryset: QuerySet[Any], search_term: str) -> tuple[Any, bool]:
        term = search_term.strip()
        return (queryset.filter(pk=_id_of(term)) if term else queryset), False

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Any:
        alias, primary = self.place_of(object_id)
        row = self.get_queryset(request).using(alias).filter(pk=_id_of(primary)).first()
        if row is not None:
            row.shows_value = may_view(self.admin_site, request, row.queue)
        return row

    @admin.display(description="result")
    def outcome(self, row: Any) -> SafeString:
        return display.badge("bad", "failed") if row.start_of_error else display.badge("good", "handled")

    @admin.display(description="message")
    def message(self, row: MessageResult) -> SafeString:
        return display.below(untrusted.inline(row.queue, 200), str(row.pk))

    @admin.display(description="started")
    def started(self, row: Any) -> Any:
        return display.ago(row.started_at, row.db_now)

    @admin.display(description="finished")
    def finished(self, row: Any) -> Any:
        return display.ago(row.finished_at, row.db_now)

    @admin.display(description="kept until")
    def expires(self, row: MessageResult) -> Any:
        return display.moment(row.expires_at)

    @admin.display(description="value")
    def returned(self, row: Any) -> Any:
        if not row.shows_value:
            return "You may not view the bodies of this queue."
        if row.body is None:
            return display.NOTHING
        try:
            content_type = read_kind(row.headers).content_type
            if is_secret(content_type):
                return "The value is encrypted."
            body = decompressed(bytes(row.body), content_type)[0] or b""
        except QueueError as error:
            return f"The value cannot be read: {untrusted.visible(str(error))[:300]}"
        return untrusted.block(untrusted.body(body[: untrusted.SHOWN], len(body)))

    @admin.display(description="error")
    def raised(self, row: MessageResult) -> Any:
        return untrusted.block(untrusted.text(row.error)) if row.error else display.NOTHING


def _id_of(text: str) -> uuid.UUID | None:
    try:
        return uuid.UUID(text)
    except ValueError:
        return None
