"""The open alerts, and which channels were notified when. Read-only: the evaluation opens and resolves alerts."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.utils.html import format_html
from django.utils.safestring import SafeString

from ..alerts import channels
from ..alerts.conditions import AGE, DEAD_WORKER, DEPTH, POISON
from ..models import Alert, Now, PoisonMessage, UtcField
from .databases import DatabaseFilter, OfDatabases
from .formatting import display, untrusted
from .read_only import ReadOnlyAdmin

OPERATE = "queueapp.operate_queue"
KINDS = {POISON: "new poison", DEAD_WORKER: "dead worker", AGE: "oldest message", DEPTH: "queue depth"}


class KindFilter(admin.SimpleListFilter):
    title = "kind"
    parameter_name = "kind"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return list(KINDS.items())

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return queryset.filter(kind=self.value()) if self.value() else queryset


class AlertAdmin(ReadOnlyAdmin, OfDatabases):
    """One row per alert that is open, or whose end was not notified yet."""

    actions = None
    show_facets = admin.ShowFacets.NEVER
    list_display = ("alert_text", "state", "open_since", "notified", "subject")
    list_display_links = None
    list_filter = (DatabaseFilter, KindFilter)
    ordering = ("-since", "key")

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return request.user.has_perm(OPERATE) or super().has_view_permission(request, obj)

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest | None = None) -> bool:
        """Only what the filters offer."""
        return lookup in {DatabaseFilter.parameter_name, KindFilter.parameter_name}

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        return super().get_queryset(request).annotate(db_now=Now(output_field=UtcField()))

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        show, context = super().changelist_view, {"title": "Alerts", **(extra_context or {})}
        return self.or_note(request, self.database(request), lambda: show(request, context))

    def change_view(self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: Any = None) -> Any:
        """There is no page per alert."""
        raise PermissionDenied

    def history_view(self, request: HttpRequest, object_id: str, extra_context: Any = None) -> HttpResponse:
        """There are no operations on alerts."""
        raise PermissionDenied

    def delete_view(self, request: HttpRequest, object_id: str, extra_context: Any = None) -> HttpResponse:
        """A deleted alert would be opened and notified again."""
        raise PermissionDenied

    # -- columns --------------------------------------------------------------------------------------------------

    @admin.display(description="alert", ordering="text")
    def alert_text(self, row: Alert) -> SafeString:
        return untrusted.inline(row.text, 500)

    @admin.display(description="state", ordering="resolved_at")
    def state(self, row: Any) -> SafeString:
        kind = KINDS.get(row.kind, "")
        if row.resolved_at is not None:
            return display.below(display.badge("good", "resolved"), kind, display.moment(row.resolved_at))
        return display.below(display.badge("bad", "open"), kind)

    @admin.display(description="since", ordering="since")
    def open_since(self, row: Any) -> Any:
        return display.ago(row.since, row.db_now)

    @admin.display(description="notified", ordering="notified_at")
    def notified(self, row: Any) -> SafeString | str:
        """The channels that were notified, and those that are pending."""
        pending = row.pending_channels.split(",") if row.pending_channels else []
        when = display.ago(row.notified_at, row.db_now) if row.notified_at is not None else "not yet"
        by = (
            ", ".join(name for name in channels.configured() if name not in pending)
            if row.notified_at is not None
            else ""
        )
        of = "that it is resolved" if row.resolved_at is not None and not pending else by and f"by {by}"
        if not pending:
            return display.below(when, of)
        tries = "" if not row.tries else f", {display.counted(row.tries, 'try', 'tries')}"
        missing = f"pending: {', '.join(pending)}{tries}"
        then = f"next try in {display.duration(row.next_try - row.db_now)}" if row.next_try > row.db_now else ""
        return display.below(when, of, untrusted.inline(missing, 200), then)

    @admin.display(description="subject", ordering="name")
    def subject(self, row: Alert) -> SafeString | str:
        """The poison group, the process, or the queue that the alert is about."""
        if row.kind == POISON:
            page: Any = self.admin_site._registry.get(PoisonMessage)
            short = untrusted.inline(row.name, 12)
            if page is None:
                return short
            return format_html('<a href="{}">{}</a>', page.list_url(row._state.db, group=row.name), short)
        return display.below(untrusted.inline(row.queue, 200), untrusted.inline(row.name, 255) if row.name else "")
