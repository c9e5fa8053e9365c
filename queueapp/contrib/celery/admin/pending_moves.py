"""Read-only admin page of pending migrations: messages that ``movebroker`` took out and has not delivered to the other
broker yet.

Only ``movebroker`` can tell whether such a message has arrived. Run again, the command continues with them;
``--put-back`` returns them to their queues.
"""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.safestring import SafeString

from ....admin.databases import DatabaseFilter
from ....admin.formatting import display, untrusted
from ....admin.large_tables.lists import ByteLength
from ....admin.message_pages import may_view
from ....admin.read_only import ResultsAdmin
from ....errors import UndecodableMessage
from ....messages import TYPE, decode_headers
from ....models import Now, UtcField
from ....sql import nonblocking
from ..models import BrokerQueue, PendingMove


@admin.register(PendingMove)
class PendingMoveAdmin(ResultsAdmin):
    """One row per message. The body is shown to users who may view the messages of the queue."""

    title = "Pending migrations"
    rows_are = "message"
    list_order = "-number"
    list_display = ("numbered", "task", "queue_name", "body_size", "since")
    list_display_links = ("numbered",)
    list_filter = (DatabaseFilter,)
    ordering = ("-number",)
    search_help_text = "The full name of a queue."
    readonly_fields = ("numbered", "task", "queue_name", "since", "headers_shown", "content")
    fields = readonly_fields

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        rows = nonblocking(super().get_queryset(request)).defer("body")
        return rows.annotate(db_now=Now(output_field=UtcField()), size=ByteLength("body"))

    def prepare_rows(self, rows: list[Any]) -> None:
        """No further columns."""

    def is_key(self, value: str) -> bool:
        return value.isdecimal()

    def get_search_results(self, request: HttpRequest, queryset: QuerySet[Any], search_term: str) -> tuple[Any, bool]:
        if not search_term:
            return queryset, False
        return (queryset.none() if "\0" in search_term else queryset.filter(queue=search_term)), False

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Any:
        alias, primary = self.place_of(object_id)
        if not primary.isdecimal() or len(primary) > 18:
            return None
        row = self.get_queryset(request).using(alias).filter(pk=int(primary)).first()
        if row is not None:
            row.shows_body = may_view(self.admin_site, request, BrokerQueue._meta.label)
        return row

    # -- columns and fields ----------------------------------------------------------------------------------------

    @admin.display(description="number, id")
    def numbered(self, row: PendingMove) -> SafeString:
        return display.below(row.number, str(row.message_id))

    @admin.display(description="task")
    def task(self, row: PendingMove) -> SafeString:
        try:
            kind = decode_headers(row.headers).get(TYPE)
        except UndecodableMessage:
            kind = None
        return untrusted.inline(kind, 120) if kind else display.NOTHING

    @admin.display(description="queue")
    def queue_name(self, row: PendingMove) -> SafeString:
        return untrusted.inline(row.queue, 255)

    @admin.display(description="size")
    def body_size(self, row: Any) -> str:
        return display.size(row.size)

    @admin.display(description="taken out")
    def since(self, row: Any) -> Any:
        return display.ago(row.taken_at, row.db_now)

    @admin.display(description="headers")
    def headers_shown(self, row: PendingMove) -> SafeString:
        whole = row.headers.encode("utf-8", "replace")
        return _text(untrusted.body(whole[: untrusted.SHOWN], len(whole)))

    @admin.display(description="body")
    def content(self, row: Any) -> SafeString | str:
        if not row.shows_body:
            return "You may not view the bodies of this queue."
        whole = None if row.body is None else bytes(row.body)
        return _text(untrusted.body(whole and whole[: untrusted.SHOWN], None if whole is None else len(whole)))


def _text(shown: untrusted.Shown) -> SafeString:
    cut = "" if shown.complete else "\n(truncated)"
    return format_html('<pre class="queueapp-text">{}{}</pre>', shown.text, cut)
