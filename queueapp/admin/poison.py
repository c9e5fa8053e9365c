"""The messages that failed for good: reason, attempts, and operations on single messages or groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from django import forms
from django.contrib import admin
from django.contrib.admin.models import CHANGE, DELETION
from django.db import Error, connections, transaction
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.urls import path
from django.utils.html import format_html
from django.utils.http import urlencode
from django.utils.safestring import SafeString

from .. import inline, registry
from ..conf import settings
from ..errors import QueueNotFound
from ..models import PoisonMessage
from ..operations import bulk_operations, selections
from ..sql import backend_of, nonblocking
from .databases import PARAMETER, DatabaseFilter
from .delayed import carried
from .edit_poison import edit_view
from .formatting import display, untrusted
from .large_tables.content_search import HELP
from .large_tables.lists import BoundedFilter
from .large_tables.search import keys_in_store
from .message_pages import Facts, MessageAdmin
from .operations import Operation, Options
from .poison_group_pages import canary_view, notes_view
from .poison_groups import failure_of, groups_of, notes_of
from .rehearse_poison import rehearse_view

#: Filters offer what occurs among so many of the newest messages, the most frequent first.
SAMPLE = 1000
CHOICES = 20

Status = PoisonMessage.Status
UNRESOLVED, ARCHIVED = Status.UNRESOLVED, Status.ARCHIVED


# -- filters -------------------------------------------------------------------------------------------------------


class StatusFilter(admin.SimpleListFilter):
    """Filters by status; by default the unresolved messages, which need an operator."""

    title = "status"
    parameter_name = "status"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [("archived", "archived"), ("edited", "edited"), ("all", "all")]

    def choices(self, changelist: Any) -> Any:
        first_choice, *choices = super().choices(changelist)
        yield {**first_choice, "display": "unresolved"}
        yield from choices

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return selections.filtered(queryset, "status", self.value())


class _Occurring(admin.SimpleListFilter):
    """Offers the values among the newest messages: bounded for any number of messages and values."""

    field = ""

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        rows = model_admin.newest(request)
        counts = Counter(str(row[self.field]) for row in rows if row[self.field])
        names = {str(row[self.field]): self.name_of(row) for row in reversed(rows)}
        chosen = request.GET.get(str(self.parameter_name))
        found = [(value, f"{names[value]} ({count})") for value, count in counts.most_common(CHOICES)]
        if chosen and all(value != chosen for value, _ in found):
            found.append((chosen, untrusted.visible(chosen)[:80]))
        return found

    def name_of(self, row: dict[str, Any]) -> str:
        return untrusted.visible(str(row[self.field]))[:80]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return selections.filtered(queryset, str(self.parameter_name), self.value() or None)


class QueueFilter(_Occurring):
    title = "queue"
    parameter_name = field = "queue"


class GroupFilter(_Occurring):
    """Filters by group: same exception at the same place, so one fix resolves all of them."""

    title = "group"
    parameter_name = "group"
    field = "group_key"

    def name_of(self, row: dict[str, Any]) -> str:
        reason = untrusted.visible(row["exception_type"] or row["reason"])
        return f"{reason[:60]} · {row['group_key'][:6]}"


class TypeFilter(_Occurring, BoundedFilter):
    title = "type"
    parameter_name = "type"
    field = "message_type"


class AttemptsFilter(BoundedFilter):
    """Filters by the number of attempts."""

    title = "attempts"
    parameter_name = "attempts"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(count, f"{count} or more") for count in selections.ATTEMPTS]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return selections.filtered(queryset, "attempts", self.value())


class FailedFilter(BoundedFilter):
    """Filters by the time of the last failure."""

    title = "failed"
    parameter_name = "failed"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(name, f"within {'an' if name == 'hour' else 'a'} {name}") for name in selections.DUE_WITHIN]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return selections.filtered(queryset, "failed", self.value())


class ExceptionFilter(_Occurring, BoundedFilter):
    title = "exception"
    parameter_name = "exception"
    field = "exception_type"


# -- what can be done ----------------------------------------------------------------------------------------------


def _queues() -> list[tuple[str, str]]:
    labels = sorted(queue._meta.label for queue in registry.queues)
    return [("", "The queue that each message came from"), *((label, label) for label in labels)]


class RequeueOptions(Options):
    """Whether the attempts start anew, and another queue in place of one that was retired."""

    counts = forms.ChoiceField(
        choices=[
            ("reset", "Reset: all attempts again, the history is dropped"),
            ("keep", "Keep: counts and history stay, one more attempt"),
        ],
        widget=forms.RadioSelect,
        initial="reset",
        label="Counts",
    )
    to = forms.ChoiceField(choices=_queues, required=False, label="Into")


def _is_unresolved(message: PoisonMessage) -> bool:
    return bool(message.status == UNRESOLVED)


def _is_archived(message: PoisonMessage) -> bool:
    return bool(message.status == ARCHIVED)


OPERATIONS = (
    Operation(
        "requeue",
        "Requeue",
        "requeued",
        "The messages go to the end of the queue that they came from and are handled again.",
        "archived, requeued or deleted meanwhile, or their queue does not exist any more",
        "requeue",
        bulk_operations.requeue,
        flag=DELETION,
        options=RequeueOptions,
        offered=_is_unresolved,
    ),
    Operation(
        "archive",
        "Archive",
        "archived",
        "Archived messages are hidden but kept until their retention is over; they can be restored.",
        "archived, requeued or deleted already",
        "triage",
        bulk_operations.archive,
        flag=CHANGE,
        offered=_is_unresolved,
    ),
    Operation(
        "restore",
        "Restore",
        "restored",
        "Restored messages are unresolved again and can be requeued.",
        "not archived, or deleted meanwhile",
        "triage",
        bulk_operations.restore,
        flag=CHANGE,
        offered=_is_archived,
    ),
    Operation(
        "delete_selected",
        "Delete",
        "deleted",
        "The messages, their bodies and their histories are deleted for good.",
        "requeued or deleted meanwhile",
        "delete",
        bulk_operations.delete,
        flag=DELETION,
        dangerous=True,
    ),
)


class PoisonAdmin(MessageAdmin):
    """All poison messages of a database, the newest first."""

    operations = OPERATIONS
    change_list_template = "admin/queueapp/poison_list.html"
    list_order = "-number"
    list_display = ("failure_reason", "from_queue", "message", "failed")
    list_display_links = ("failed", "message")
    list_filter = (
        DatabaseFilter,
        StatusFilter,
        QueueFilter,
        GroupFilter,
        ExceptionFilter,
        TypeFilter,
        AttemptsFilter,
        FailedFilter,
    )
    sortable_by = ("failed",)
    search_help_text = f"{HELP} At most 50,000 messages are read."

    # -- permissions ----------------------------------------------------------------------------------------------

    def has_requeue_permission(self, request: HttpRequest) -> bool:
        """``queueapp.requeue_poisonmessage``."""
        return self._may(request, "requeue")

    def has_triage_permission(self, request: HttpRequest) -> bool:
        """Archiving and restoring: Django's change permission."""
        return self._may(request, "change")

    def has_edit_permission(self, request: HttpRequest) -> bool:
        """``queueapp.edit_poisonmessage``. The user must be allowed to see the body as well."""
        return self._may(request, "edit")

    # -- the list -------------------------------------------------------------------------------------------------

    def newest(self, request: HttpRequest) -> list[dict[str, Any]]:
        """The newest messages, for the choices of the filters; fetched once per request."""
        rows = getattr(request, "_queueapp_newest_poison", None)
        if rows is None:
            columns = ("queue", "exception_type", "group_key", "reason", "message_type")
            newest = nonblocking(PoisonMessage.objects.using(self.database(request))).order_by("-number")
            rows = list(newest.values(*columns)[:SAMPLE])
            request._queueapp_newest_poison = rows  # type: ignore[attr-defined]
        return rows

    def keys_of_id(self, rows: QuerySet[Any], term: str) -> list[int]:
        return keys_in_store(nonblocking(self.model.objects.using(rows.db)), self.list_order, term)

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        alias = self.database(request)
        context: dict[str, Any] = {
            "title": "Poison messages",
            "may_requeue": self.has_requeue_permission(request),
            "may_triage": self.has_triage_permission(request),
            "database_query": urlencode({PARAMETER: alias}) if alias != self.databases()[0] else "",
        }
        # The list as it opens, of all queues or of one: another filter, a search or a further page is about messages.
        if request.method == "GET" and not request.GET.keys() - {PARAMETER, "queue"}:
            with suppress(Error), transaction.atomic(using=alias):
                unresolved = PoisonMessage.objects.using(alias).filter(status=UNRESOLVED)
                if queue := request.GET.get("queue"):
                    unresolved = unresolved.filter(queue=queue)
                now = backend_of(connections[alias]).now(connections[alias])
                context["groups"] = groups_of(unresolved, now)
        elif request.method == "GET" and (group := request.GET.get("group", "")) and "\0" not in group:
            context["group_key"] = group
            with suppress(Error), transaction.atomic(using=alias):
                context["notes"] = notes_of(alias, group)
        return super().changelist_view(request, {**context, **(extra_context or {})})

    def list_with(self, message: Any) -> str:
        status = {} if message.status == UNRESOLVED else {"status": str(message.status)}
        return self.list_url(message._state.db, **status)

    def message_type(self, row: Any) -> str:
        return row.message_type or super().message_type(row)

    @admin.display(description="failed", ordering="number")
    def failed(self, row: Any) -> Any:
        attempts = f"{row.attempts} attempt{'' if row.attempts == 1 else 's'}"
        return display.below(
            display.ago(row.failed_at, row.db_now), attempts, "" if _is_unresolved(row) else self.state(row)
        )

    @admin.display(description="queue, consumer")
    def from_queue(self, row: Any) -> SafeString:
        return display.below(
            untrusted.inline(row.queue, 50), untrusted.inline(row.consumer, 60) if row.consumer else ""
        )

    @admin.display(description="reason")
    def failure_reason(self, row: Any) -> SafeString:
        exception, reason = failure_of(row.reason, row.exception_type)
        named = format_html("<code>{}</code> ", untrusted.inline(exception, 50)) if exception else ""
        group = format_html("group {}", self.group(row)) if row.group_key else ""
        return display.below(format_html("{}{}", named, untrusted.inline(reason, 200)), group)

    @admin.display(description="group")
    def group(self, row: Any) -> Any:
        if not row.group_key:
            return display.NOTHING
        url = self.list_url(row._state.db, group=row.group_key)
        return format_html(
            '<a href="{}" title="All messages of this group"><code>{}</code></a>', url, row.group_key[:6]
        )

    @admin.display(description="status")
    def state(self, row: Any) -> SafeString:
        return display.badge("bad" if row.status == UNRESOLVED else "quiet", row.status)

    # -- one message ----------------------------------------------------------------------------------------------

    def title_of(self, message: Any) -> str:
        return f"Poison message {message.message_id}"

    def queues_of_body(self, message: PoisonMessage) -> set[str]:
        return {message.queue, message.destination or message.queue}

    def may_edit(self, request: HttpRequest, message: PoisonMessage) -> bool:
        """Whether this user may edit this message. The form shows its body."""
        return self.has_edit_permission(request) and self.may_see_body(request, message)

    def facts(self, request: HttpRequest, message: PoisonMessage) -> Facts:
        text = untrusted.inline
        worker = f"{message.host} {message.process} {message.worker_version}".strip()
        queue: Any = None
        with suppress(QueueNotFound):
            queue = registry.queues.find(message.queue)
        failure: list[tuple[str, Any]] = [
            ("Status", self.state(message)),
            ("Reason", text(message.reason, 500)),
            ("Exception", text(message.exception_type, 255) if message.exception_type else display.NOTHING),
            ("Queue", display.queue_link(message.queue, queue, self.admin_site, request)),
            ("Consumer", text(message.consumer, 200) if message.consumer else display.NOTHING),
            ("Attempts", message.attempts),
            ("First failed", display.moment(message.first_failed_at)),
            ("Last failed", display.moment(message.failed_at)),
            ("Worker", text(worker, 400) if worker else display.NOTHING),
            ("Group", self.group(message)),
            ("Meant for", text(message.destination, 200) if message.destination else ""),
            ("Archived", display.moment(message.archived_at) if message.status == ARCHIVED else ""),
            ("Deleted", self._deleted_at(message)),
            ("Edited", display.moment(message.archived_at) if message.status == Status.EDITED else ""),
            ("Edited as", message.edited_as or ""),
            ("Edited from", self._original(message)),
        ]
        return [
            ("Failure", [(name, value) for name, value in failure if value != ""]),
            (
                "Message",
                [
                    ("Number", message.pk),
                    ("Id", message.message_id),
                    ("Type", self.type_name(message, 500)),
                    *carried(message),
                ],
            ),
        ]

    @staticmethod
    def _deleted_at(message: PoisonMessage) -> Any:
        """When its retention is over; '' for an unresolved message, which is kept."""
        if _is_unresolved(message) or message.archived_at is None or not settings.POISON_RETENTION:
            return ""
        return format_html("not before {}", display.moment(message.archived_at + settings.POISON_RETENTION))

    def _original(self, message: PoisonMessage) -> Any:
        """The message that this one was edited from, as a link while it exists."""
        if message.edit_of is None:
            return ""
        originals = nonblocking(PoisonMessage.objects.using(message._state.db)).filter(message_id=message.edit_of)
        original = originals.only("number").first()
        if original is None:
            return message.edit_of
        return format_html('<a href="{}">{}</a>', self.url_of(original), message.edit_of)

    def get_urls(self) -> list[Any]:
        name = f"{self.opts.app_label}_{self.opts.model_name}"
        views = {"edit": self.edit_view, "rehearse": self.rehearse_view}
        pages = [
            path(f"<path:object_id>/{verb}/", self.admin_site.admin_view(view), name=f"{name}_{verb}")
            for verb, view in views.items()
        ]
        pages += [
            path(f"{verb}/", self.admin_site.admin_view(partial(self.group_view, view=view)), name=f"{name}_{verb}")
            for verb, view in {"canary": canary_view, "note": notes_view}.items()
        ]
        return [*pages, *super().get_urls()]

    def group_view(self, request: HttpRequest, view: Callable[[Any, HttpRequest], HttpResponse]) -> HttpResponse:
        """A page about a whole group: its canary, or a note on it."""
        return self.or_note(request, self.database(request), lambda: view(self, request))

    def edit_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """The page that edits a message and requeues the copy."""
        return self.page_of(request, object_id, partial(edit_view, self, request))

    def rehearse_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """The page that rehearses a message."""
        return self.page_of(request, object_id, partial(rehearse_view, self, request))

    def more_of(self, request: HttpRequest, message: PoisonMessage) -> dict[str, Any]:
        return {
            "exception_message": untrusted.text(message.exception_message),
            "traceback": untrusted.text(message.traceback),
            "edit": _is_unresolved(message) and self.may_edit(request, message),
            "rehearse": inline.can_rehearse() and self.may_edit(request, message),
        }
