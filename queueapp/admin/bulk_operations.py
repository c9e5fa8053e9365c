"""The operations that are carried out in the background: who started what, how far it is, and what failed.

An operation is paused, resumed and stopped by the user who has started it, and by users with ``operate_queue`` or the
change permission.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

from django.contrib import admin, messages
from django.contrib.admin.models import CHANGE
from django.contrib.admin.utils import unquote
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import path
from django.utils.html import format_html
from django.utils.http import urlencode
from django.utils.safestring import SafeString

from ..models import MAINTENANCE, BulkOperation, Now, Subscriber, UtcField
from ..operations import bulk_operations, requeue_after_deploy, selections
from .databases import DatabaseFilter, OfDatabases
from .formatting import display, untrusted
from .operations import Rate, is_key, log_entry, render_page
from .read_only import OPERATE, ReadOnlyAdmin

State = BulkOperation.State
TONES: dict[str, display.Tone] = {
    State.RUNNING: "busy", State.PAUSED: "warn", State.STOPPED: "quiet", State.FINISHED: "good",
}  # fmt: skip
#: The buttons of each state.
VERBS = {State.RUNNING: ("pause", "stop"), State.PAUSED: ("resume", "stop")}
_DO = {"pause": bulk_operations.pause, "resume": bulk_operations.resume, "stop": bulk_operations.stop}
_DONE = {"pause": "paused", "resume": "running again", "stop": "stopped", "rate": "at the new rate"}
#: Why messages were skipped: by a replay, by others, and by a canary.
_SKIPPED = {True: "not for the queue, or not matched by the filter", False: "in flight, or gone"}
_SKIPPED_BY_CANARY = "locked by another session, or a message with the same dedupe key waits"


class StateFilter(admin.SimpleListFilter):
    title = "state"
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(str(value), str(value)) for value in State.values]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return queryset.filter(state=self.value()) if self.value() else queryset


class BulkOperationAdmin(ReadOnlyAdmin, OfDatabases):
    """The operations of a database, the newest first."""

    actions = None
    show_facets = admin.ShowFacets.NEVER
    list_display = ("what", "state_badge", "progress", "counts", "user", "started")
    list_display_links = ("what",)
    list_filter = (DatabaseFilter, StateFilter)
    sortable_by = ()

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """With the permission, and for the operations that the user has started."""
        is_own = obj is not None and obj.started_by_id is not None and obj.started_by_id == request.user.pk
        return is_own or request.user.has_perm(OPERATE) or super().has_view_permission(request, obj)

    def may_control(self, request: HttpRequest, operation: BulkOperation) -> bool:
        """Whether the user may pause, resume and stop it."""
        is_own = operation.started_by_id is not None and operation.started_by_id == request.user.pk
        change = f"{self.opts.app_label}.change_{self.opts.model_name}"
        return is_own or request.user.has_perm(OPERATE) or request.user.has_perm(change)

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest | None = None) -> bool:
        """Only what the filters offer."""
        return lookup in {DatabaseFilter.parameter_name, StateFilter.parameter_name}

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        return super().get_queryset(request).annotate(db_now=Now(output_field=UtcField()))

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Any:
        alias, primary = self.place_of(object_id)
        return self.get_queryset(request).using(alias).filter(pk=int(primary)).first() if is_key(primary) else None

    def get_urls(self) -> list[Any]:
        name = f"{self.opts.app_label}_{self.opts.model_name}"
        views = [
            path(f"<path:object_id>/{verb}/", self.admin_site.admin_view(partial(self.control_view, verb=verb)),
                 name=f"{name}_{verb}")
            for verb in (*_DO, "rate")
        ]  # fmt: skip
        return [*views, *super().get_urls()]

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        show, context = super().changelist_view, {"title": "Operations", **(extra_context or {})}
        return self.or_note(request, self.database(request), lambda: show(request, context))

    def delete_view(self, request: HttpRequest, object_id: str, extra_context: Any = None) -> HttpResponse:
        """Never: they are the record of what was done."""
        raise PermissionDenied

    # -- one operation ------------------------------------------------------------------------------------------------

    def change_view(self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: Any = None) -> Any:
        """The page of one operation."""
        if request.method not in ("GET", "HEAD"):
            raise PermissionDenied
        alias = self.place_of(unquote(object_id))[0]
        return self.or_note(request, alias, lambda: self._page(request, self._find(request, object_id)))

    def _find(self, request: HttpRequest, object_id: str) -> Any:
        operation = self.get_object(request, unquote(object_id))
        if operation is None:
            raise Http404("There is no such operation.")
        if not self.has_view_permission(request, operation):
            raise PermissionDenied
        return operation

    def _page(self, request: HttpRequest, operation: Any) -> HttpResponse:
        may_control = self.may_control(request, operation) and operation.state in VERBS
        verbs = VERBS[operation.state] if may_control else ()
        context = {
            "original": self.named_row(operation),
            "operation": operation,
            "badge": self.state_badge(operation),
            "percent": percent(operation),
            "facts": self._facts(request, operation),
            "errors": [(key, untrusted.inline(text, 300)) for key, text in json.loads(operation.errors)],
            "buttons": [(verb.capitalize(), self.url_of(operation, verb), verb == "stop") for verb in verbs],
            "rate_form": Rate(initial={"rate": operation.rate}) if may_control and not _is_canary(operation) else None,
            "rate_url": self.url_of(operation, "rate"),
            "is_live": operation.state in VERBS,
            "waits": operation.state == State.RUNNING and not _has_maintenance(operation._state.db),
            "list_url": self.list_url(operation._state.db),
            "history_url": self.url_of(operation, "history"),
        }
        title = f"{str(operation).capitalize()}: {label_of(operation)}"
        return render_page(self, request, "admin/queueapp/bulk_operation.html", title, context)

    def _facts(self, request: HttpRequest, operation: Any) -> list[tuple[str, Any]]:
        given = json.loads(operation.options)
        options = ", ".join(f"{name}: {value}" for name, value in given.items() if value not in ("", None))
        is_canary = _is_canary(operation)
        if is_canary:
            # It takes its next batch when the last one has ended.
            pace = ("In the queue", f"{requeue_after_deploy.waiting_in(operation):,} of the last batch")
            changed, failed, skipped = "Handled", "Failed again", _SKIPPED_BY_CANARY
        else:
            pace = ("Rate", f"at most {operation.rate:,g} a second" if operation.rate else "as fast as it can")
            changed, failed = "Changed", "Failed"
            skipped = _SKIPPED[operation.action == bulk_operations.REPLAY]
        seconds = (operation.changed_at - operation.started_at).total_seconds()
        per_second = operation.changed / seconds if seconds > 0 and not is_canary else 0
        facts = [
            ("On", self._source_link(request, operation)),
            ("Options", untrusted.inline(options, 300) if options else ""),
            ("Started", format_html("{} by {}", display.moment(operation.started_at), self.user(operation))),
            ("Last batch", display.ago(operation.changed_at, operation.db_now)),
            pace,
            (changed, f"{operation.changed:,}" + (f" ({per_second:,.0f} a second)" if per_second else "")),
            ("Skipped", f"{operation.skipped:,} ({skipped})" if operation.skipped else "0"),
            (failed, f"{operation.failed:,}"),
        ]
        return [(name, value) for name, value in facts if value != ""]

    def _source_link(self, request: HttpRequest, operation: Any) -> Any:
        """The list that it was started from, with its filters."""
        source = selections.source_of(operation.source, operation._state.db)
        filters = json.loads(operation.filters)
        text = f"{operation.source}{'?' if filters else ''}{urlencode(filters)}"
        page: Any = None if source is None else self.admin_site._registry.get(source.model)
        if source is None or page is None or not page.has_view_permission(request):
            return untrusted.inline(text, 300)
        return format_html('<a href="{}">{}</a>', page.list_url(source.alias, **filters), untrusted.inline(text, 300))

    def control_view(self, request: HttpRequest, object_id: str, verb: str) -> HttpResponse:
        """Pause, resume or stop an operation, or change its rate. POST only."""
        operation = self._find(request, object_id)
        if not self.may_control(request, operation):
            raise PermissionDenied
        if request.method != "POST":
            return HttpResponse(status=405, headers={"Allow": "POST"})
        alias = operation._state.db
        if verb == "rate":
            form = Rate(request.POST)
            changed = form.is_valid() and bulk_operations.set_rate(operation.pk, form.cleaned_data["rate"], using=alias)
        else:
            changed = _DO[verb](operation.pk, using=alias)
        text = f"{str(operation).capitalize()} is {_DONE[verb]}."
        if changed:
            log_entry(self, request, f"{verb.capitalize()}.", row=operation, flag=CHANGE).save()
            self.message_user(request, text, messages.SUCCESS)
        else:
            self.message_user(
                request, f"Nothing was changed: {operation} has ended, or is it already.", messages.WARNING
            )
        return HttpResponseRedirect(self.url_of(operation))

    # -- columns ------------------------------------------------------------------------------------------------------

    @admin.display(description="operation")
    def what(self, row: BulkOperation) -> SafeString:
        filters = json.loads(row.filters)
        where = f"{row.source}{'?' if filters else ''}{urlencode(filters)}"
        return display.below(f"{row.pk} · {label_of(row)}", untrusted.inline(where, 100))

    @admin.display(description="state")
    def state_badge(self, row: Any) -> SafeString:
        return display.badge(TONES[row.state], row.state)

    @admin.display(description="progress")
    def progress(self, row: BulkOperation) -> SafeString:
        return format_html('<progress max="100" value="{0}" aria-label="{0} %"></progress> {0} %', percent(row))

    @admin.display(description="messages")
    def counts(self, row: BulkOperation) -> SafeString:
        failed = f"{row.failed:,} failed" if row.failed else ""
        return display.below(f"{row.changed:,} changed", f"{row.skipped:,} skipped" if row.skipped else "", failed)

    @admin.display(description="by")
    def user(self, row: BulkOperation) -> SafeString:
        return untrusted.inline(row.username or ("maintenance or a command" if _is_canary(row) else "a script"), 60)

    @admin.display(description="started")
    def started(self, row: Any) -> Any:
        return display.ago(row.started_at, row.db_now)


def _is_canary(operation: BulkOperation) -> bool:
    return operation.action == requeue_after_deploy.ACTION


def percent(operation: BulkOperation) -> int:
    """How far it is, by the keys of its table."""
    count = operation.last - operation.first + 1
    if operation.state == State.FINISHED or count <= 0:
        return 100
    return max(0, min(99, 100 * (operation.cursor - operation.first + 1) // count))


def label_of(operation: BulkOperation) -> str:
    """The action in words."""
    name = operation.action.removesuffix("_selected").replace("_", " ")
    if (operation.source, name) == ("queueapp.DelayedMessage", "delete"):
        return "Cancel"
    return name.capitalize()


def _has_maintenance(alias: str) -> bool:
    """Whether a live process carries operations of this database out."""
    return Subscriber.objects.using(alias).filter(queue=MAINTENANCE, alive_until__gt=Now()).exists()
