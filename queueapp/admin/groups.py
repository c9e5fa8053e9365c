"""The message groups: which are open, how their members ended, closing one and completing one by hand."""

from __future__ import annotations

from typing import Any

from django.contrib import admin, messages
from django.contrib.admin.models import CHANGE
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.utils.safestring import SafeString

from ..flow import group_members
from ..models import GroupMember, MessageGroup, Now, UtcField
from ..sending.workflows import counts_of
from .databases import DatabaseFilter, OfDatabases
from .formatting import display, untrusted
from .operations import log_entry
from .read_only import OperatedAdmin

#: Failed members that the page of a group lists.
LISTED = 20


class GroupAdmin(OperatedAdmin, OfDatabases):
    """One row per group."""

    show_facets = admin.ShowFacets.NEVER
    # From the row alone: the members of groups that are not complete are counted on their pages.
    list_display = ("group", "result", "created", "done", "failed")
    list_filter = (DatabaseFilter,)
    ordering = ("-created_at",)
    actions = ("close", "complete")
    fieldsets = (
        (None, {"fields": ("group", "state", "around", "created", "completed")}),
        ("Members", {"fields": ("waiting", "handled", "not_handled", "failures")}),
    )
    readonly_fields = (
        "group", "state", "around", "created", "completed", "waiting", "handled", "not_handled", "failures"
    )  # fmt: skip

    # -- pages ----------------------------------------------------------------------------------------------------

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        return super().get_queryset(request).annotate(db_now=Now(output_field=UtcField()))

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Any:
        alias, primary = self.place_of(object_id)
        row = self.get_queryset(request).using(alias).filter(pk=primary).first()
        if row is not None:
            row.counts = counts_of(alias, row.id)
        return row

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest | None = None) -> bool:
        """Only what the filter offers."""
        return lookup == DatabaseFilter.parameter_name

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        show, context = super().changelist_view, {"title": "Message groups", **(extra_context or {})}
        return self.or_note(request, self.database(request), lambda: show(request, context))

    # -- columns --------------------------------------------------------------------------------------------------

    @admin.display(description="group")
    def group(self, row: MessageGroup) -> SafeString:
        return display.below(*([untrusted.inline(row.name, 200)] if row.name else []), str(row.id))

    @admin.display(description="state")
    def result(self, row: MessageGroup) -> SafeString:
        if row.completed_at is None:
            return display.badge("quiet", "not complete")
        return display.badge("bad", "failed") if row.failed else display.badge("good", "complete")

    @admin.display(description="state")
    def state(self, row: MessageGroup) -> SafeString:
        if row.completed_at is not None:
            return self.result(row)
        members = GroupMember.objects.using(row._state.db)
        is_open = members.filter(pk=group_members.opening_of(row.id)).exists()
        return display.badge("quiet", "open" if is_open else "waiting")

    @admin.display(description="created", ordering="created_at")
    def created(self, row: Any) -> Any:
        return display.ago(row.created_at, row.db_now)

    @admin.display(description="completed")
    def completed(self, row: Any) -> Any:
        return display.ago(row.completed_at, row.db_now)

    @admin.display(description="parent group")
    def around(self, row: MessageGroup) -> Any:
        return str(row.parent) if row.parent is not None else display.NOTHING

    @admin.display(description="waiting")
    def waiting(self, row: Any) -> str:
        return f"{row.counts.waiting:,}"

    @admin.display(description="done")
    def handled(self, row: Any) -> str:
        return f"{row.counts.done:,}"

    @admin.display(description="failed")
    def not_handled(self, row: Any) -> str:
        return f"{row.counts.failed:,}"

    @admin.display(description="failed members")
    def failures(self, row: MessageGroup) -> Any:
        members = GroupMember.objects.using(row._state.db).filter(group_id=row.id, outcome__gt=0)
        found = members.order_by("message_id")[:LISTED]
        lines = [f"{member.message_id}: {member.get_outcome_display().lower()}" for member in found]
        return display.below(*lines) if lines else display.NOTHING

    # -- operations -----------------------------------------------------------------------------------------------

    @admin.action(description="Close", permissions=["operate"])
    def close(self, request: HttpRequest, queryset: QuerySet[Any]) -> None:
        """Close open groups: each completes as soon as no member waits."""
        for row in queryset:
            group_members.close(queryset.db, row.id)
            log_entry(self, request, "Group closed.", row=row, flag=CHANGE).save()
        self.message_user(request, f"{display.counted(len(queryset), 'group', 'groups')} closed.", messages.SUCCESS)

    @admin.action(description="Complete now: waiting members count as failed", permissions=["operate"])
    def complete(self, request: HttpRequest, queryset: QuerySet[Any]) -> None:
        """Complete groups whose members do not all end."""
        completed = 0
        for row in queryset:
            if group_members.complete_now(queryset.db, row.id):
                completed += 1
                log_entry(self, request, "Group completed by hand.", row=row, flag=CHANGE).save()
        text = f"{display.counted(completed, 'group', 'groups')} completed."
        self.message_user(request, text, messages.SUCCESS if completed else messages.WARNING)
