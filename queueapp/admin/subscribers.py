"""The worker processes that receive: who is alive, since when, and how much each has done. Nothing to change here."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.utils.safestring import SafeString

from ..models import Now, Subscriber, UtcField
from .showing import display, untrusted


class AliveFilter(admin.SimpleListFilter):
    title = "alive"
    parameter_name = "alive"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [("yes", "alive"), ("no", "dead")]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        if self.value() == "yes":
            return queryset.filter(alive_until__gt=Now())
        return queryset.filter(alive_until__lte=Now()) if self.value() == "no" else queryset


class SubscriberAdmin(admin.ModelAdmin):
    """One row per worker process and queue."""

    actions = None
    show_facets = admin.ShowFacets.NEVER
    list_display = (
        "queue_name", "holder", "state", "heartbeat", "started", "version_name",
        "concurrency", "outstanding", "received", "handled", "failed",
    )  # fmt: skip
    list_display_links = ("queue_name",)
    list_filter = (AliveFilter, ("queue", admin.AllValuesFieldListFilter))
    ordering = ("queue", "host", "process")
    readonly_fields = (
        "queue_name", "holder", "state", "heartbeat", "started", "version_name", "id", "supervisor",
        "concurrency", "outstanding", "received", "handled", "failed",
    )  # fmt: skip
    fields = readonly_fields

    class Media:
        css = {"all": ["queueapp/admin.css"]}

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Never: without its row a live worker counts as dead and loses its leases; housekeeping removes dead ones."""
        return False

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        return super().get_queryset(request).annotate(db_now=Now(output_field=UtcField()))

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        return super().changelist_view(request, {"title": "Subscribers", **(extra_context or {})})

    @admin.display(description="queue", ordering="queue")
    def queue_name(self, row: Subscriber) -> SafeString:
        return untrusted.inline(row.queue)

    @admin.display(description="process", ordering="host")
    def holder(self, row: Subscriber) -> SafeString:
        return untrusted.inline(f"{row.host}:{row.process}")

    @admin.display(description="state", ordering="alive_until")
    def state(self, row: Any) -> SafeString:
        left = row.alive_until - row.db_now
        if left.total_seconds() > 0:
            return display.badge("good", "alive")
        return display.badge("bad", f"dead for {display.duration(left)}")

    @admin.display(description="heartbeat", ordering="heartbeat_at")
    def heartbeat(self, row: Any) -> Any:
        return display.ago(row.heartbeat_at, row.db_now)

    @admin.display(description="started", ordering="started_at")
    def started(self, row: Any) -> Any:
        return display.ago(row.started_at, row.db_now)

    @admin.display(description="version")
    def version_name(self, row: Subscriber) -> Any:
        return untrusted.inline(row.version) if row.version else display.NOTHING
