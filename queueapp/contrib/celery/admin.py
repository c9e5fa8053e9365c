"""Admin pages of Celery: declared queues, results and pending migrations. All names and texts are untrusted.

A pending migration is a message that ``movebroker`` took out and has not delivered to the other broker yet. Only
``movebroker`` can tell whether such a message has arrived. Run again, the command continues with them; ``--put-back``
returns them to their queues.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.models import CHANGE, DELETION
from django.contrib.admin.utils import unquote
from django.contrib.admin.views.main import ChangeList
from django.db.models import Count, Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

from ...admin.databases import DatabaseFilter, OfDatabases, StrictChangeList
from ...admin.formatting import display, untrusted
from ...admin.large_tables.lists import BoundedFilter, ByteLength
from ...admin.message_pages import may_view
from ...admin.operations import ask, is_gone, log_entry
from ...admin.read_only import OperatedAdmin, ResultsAdmin
from ...errors import UndecodableMessage
from ...messages import TYPE, decode_headers
from ...models import Now, UtcField
from ...operations.live_workers import live_on
from ...sql import nonblocking
from . import topology as declared
from .models import MAX_ID_LENGTH, BrokerQueue, CeleryResult, DeclaredQueue, PendingMove

DELETE = "queueapp_celery.delete_declaredqueue"
LABEL = BrokerQueue._meta.label
#: Maximum number of messages counted per queue, of bindings listed, and of queues named on the confirmation page.
COUNT_LIMIT, MAX_BINDINGS, MAX_NAMES = 1000, 100, 10


class QueueFigures:
    """The figures of one queue, counted up to ``COUNT_LIMIT`` messages."""

    def __init__(self, alias: str, name: str) -> None:
        counted = nonblocking(BrokerQueue.objects.using(alias).filter(recipient=name)).order_by()[:COUNT_LIMIT]
        live = Q(lease_expires__gte=Now())
        found = counted.aggregate(all=Count("pk"), leased=Count("pk", filter=live))
        self.leased = found["leased"]
        self.waiting = found["all"] - self.leased
        self.more = found["all"] == COUNT_LIMIT
        self.delayed = nonblocking(declared.delayed(alias, name)).order_by()[:COUNT_LIMIT].count()
        self.bindings = declared.bindings_of(alias, name)


class DeclaredQueueList(StrictChangeList):
    """The list, with the figures of each queue on the page."""

    def get_results(self, request: HttpRequest) -> None:
        """The rows of the page, with their figures."""
        super().get_results(request)
        rows = list(self.result_list)
        alias = self.model_admin.database(request)
        consumed = consumed_queues(alias)
        for row in rows:
            row.figures, row.consumed = QueueFigures(alias, row.pk), consumed
        self.result_list = rows


def consumed_queues(alias: str) -> set[str] | None:
    """The queues that live workers consume; None: a worker does not report its queues."""
    return live_on(alias, [LABEL])[LABEL].recipients


@admin.register(DeclaredQueue)
class DeclaredQueueAdmin(OperatedAdmin, OfDatabases):
    """One row per queue. The action ``delete_queues`` deletes one with its messages, which Django's delete page would
    leave behind."""

    show_facets = admin.ShowFacets.NEVER
    list_display = ("queue_name", "waiting", "consumer", "bound", "expiry")
    list_display_links = ("queue_name",)
    list_filter = (DatabaseFilter,)
    list_per_page = 50
    ordering = ("name",)
    search_fields = ("name",)
    search_help_text = "A name or the beginning of one."
    actions = ("purge", "delete_queues")
    readonly_fields = (
        "queue_name",
        "waiting",
        "consumer",
        "bindings",
        "expiry",
        "message_ttl",
        "declared_with",
        "declared",
    )
    fields = readonly_fields

    # -- permissions -----------------------------------------------------------------------------------------------

    def has_delete_queue_permission(self, request: HttpRequest) -> bool:
        """Permission to delete a queue: Django's delete permission."""
        return request.user.has_perm(DELETE)

    # -- keys: the name of a queue may contain a colon -------------------------------------------------------------

    def key_of(self, row: Any) -> str:
        """The key with the database alias."""
        return f"{row._state.db}:{row.pk}"

    def place_of(self, key: str) -> tuple[str, str]:
        """(database, name)."""
        alias, _, name = key.partition(":")
        known = self.databases()
        return (alias, name) if alias in known and "\0" not in name else (known[0], "")

    # -- pages -----------------------------------------------------------------------------------------------------

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return DeclaredQueueList

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest | None = None) -> bool:
        """Only the lookup of the filter."""
        return lookup == DatabaseFilter.parameter_name

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        return super().get_queryset(request).annotate(db_now=Now(output_field=UtcField()))  # type: ignore[no-any-return]

    def get_search_results(self, request: HttpRequest, queryset: QuerySet[Any], search_term: str) -> tuple[Any, bool]:
        if "\0" in search_term:
            return queryset.none(), False
        return (queryset.filter(name__startswith=search_term) if search_term else queryset), False

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        show, context = super().changelist_view, {"title": "Celery queues", **(extra_context or {})}
        return self.or_note(request, self.database(request), lambda: show(request, context))

    def change_view(self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: Any = None) -> Any:
        """The read-only page of one queue."""
        name = f"{self.admin_site.name}:{self.opts.app_label}_{self.opts.model_name}_history"
        # Django's own link lacks the database.
        context = {"history_url": reverse(name, args=(object_id,)), **(extra_context or {})}
        return super().change_view(request, object_id, form_url, context)

    def history_view(self, request: HttpRequest, object_id: str, extra_context: Any = None) -> HttpResponse:
        """The actions on one queue."""
        show, alias = super().history_view, self.place_of(unquote(object_id))[0]
        return self.or_note(request, alias, lambda: show(request, object_id, extra_context))

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Any:
        alias, name = self.place_of(object_id)
        row = self.get_queryset(request).using(alias).filter(pk=name).first()
        if row is not None:
            row.figures, row.consumed = QueueFigures(alias, name), consumed_queues(alias)
        return row

    # -- columns and fields ----------------------------------------------------------------------------------------

    @admin.display(description="queue", ordering="name")
    def queue_name(self, row: DeclaredQueue) -> SafeString:
        kinds = [word for word, is_set in (("durable", row.durable), ("auto-delete", row.auto_delete)) if is_set]
        return display.below(untrusted.inline(row.name, 80), ", ".join(kinds))

    @admin.display(description="ready, in flight")
    def waiting(self, row: Any) -> SafeString:
        of: QueueFigures = row.figures
        plus = "+" if of.more else ""
        delayed = f"{of.delayed:,}{'+' if of.delayed == COUNT_LIMIT else ''} delayed" if of.delayed else ""
        return display.below(f"{of.waiting:,}{plus}", f"{of.leased:,}{plus} in flight" if of.leased else "", delayed)

    @admin.display(description="consumer")
    def consumer(self, row: Any) -> SafeString:
        if row.consumed is None:
            return display.badge("quiet", "unknown")
        return display.badge("good", "active consumer") if row.name in row.consumed else display.badge("quiet", "none")

    @admin.display(description="bound to")
    def bound(self, row: Any) -> SafeString:
        found = row.figures.bindings
        if not found:
            return display.NOTHING
        more = f"and {len(found) - 2:,} more" if len(found) > 2 else ""
        return display.below(*(_binding(exchange, key, 40) for exchange, key in found[:2]), more)

    @admin.display(description="bindings")
    def bindings(self, row: Any) -> SafeString:
        found = row.figures.bindings
        if not found:
            return display.NOTHING
        # One line each, even if a name contains line breaks.
        lines = [" ".join(f"{exchange} [{key}]".split()) for exchange, key in found[:MAX_BINDINGS]]
        if len(found) > MAX_BINDINGS:
            lines.append(f"and {len(found) - MAX_BINDINGS:,} more")
        return untrusted.block(untrusted.text("\n".join(lines)))

    @admin.display(description="expires", ordering="expires_at")
    def expiry(self, row: Any) -> Any:
        return "never" if row.expires_at is None else display.ago(row.expires_at, row.db_now)

    @admin.display(description="message TTL")
    def message_ttl(self, row: DeclaredQueue) -> str:
        return "none" if row.message_ttl_ms is None else f"{row.message_ttl_ms / 1000:,.3f} s"

    @admin.display(description="arguments")
    def declared_with(self, row: DeclaredQueue) -> SafeString:
        try:
            text = json.dumps(json.loads(row.arguments), indent=2, ensure_ascii=False)
        except (ValueError, RecursionError):
            text = row.arguments
        return untrusted.block(untrusted.text(text))

    @admin.display(description="declared")
    def declared(self, row: Any) -> Any:
        return display.ago(row.declared_at, row.db_now)

    # -- actions ------------------------------------------------------------------------------------------

    @admin.action(description="Purge", permissions=["operate"])
    def purge(self, request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponse | None:
        """Delete the ready and the delayed messages of these queues."""
        explanation = (
            "Ready and delayed messages are deleted permanently; their tasks become REVOKED. Messages in flight stay."
        )
        return self._do(request, queryset, "purge", "Purge", explanation, _purge, CHANGE)

    @admin.action(description="Delete", permissions=["delete_queue"])
    def delete_queues(self, request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponse | None:
        """Delete queues without an active consumer."""
        explanation = (
            "The queues are deleted permanently, with their bindings and messages, delayed ones included; their tasks "
            "become REVOKED. A queue with an active consumer is skipped. Programs that publish to a deleted queue "
            "through an exchange must declare it again, or their messages are dropped."
        )
        return self._do(request, queryset, "delete_queues", "Delete", explanation, _delete, DELETION)

    def _do(
        self,
        request: HttpRequest,
        queryset: QuerySet[Any],
        name: str,
        label: str,
        explanation: str,
        run: Callable[[str, str], int | None],
        flag: int,
    ) -> HttpResponse | None:
        if is_gone(self, request, queryset):
            return None
        rows = list(queryset.order_by("name"))
        count_text = f"{len(rows)} queue{'' if len(rows) == 1 else 's'}"
        if "confirmed" not in request.POST:
            return ask(
                self, request, title=f"{label} {count_text}?", explanation=explanation,
                few=[untrusted.inline(row.name, 200) for row in rows[:MAX_NAMES]],
                more=str(len(rows) - MAX_NAMES) if len(rows) > MAX_NAMES else "",
                hidden=[("action", name), *((ACTION_CHECKBOX_NAME, row.pk) for row in rows)],
                yes=label, dangerous=True, post_to=request.get_full_path(), back_to=self.list_url(queryset.db),
            )  # fmt: skip
        count, done = 0, 0
        for row in rows:
            changed = run(queryset.db, row.pk)
            if changed is None:
                continue
            count, done = count + changed, done + 1
            log_entry(self, request, f"{label}: {display.messages(changed)}.", row=row, flag=flag).save()
        text = f"{display.messages(count)} deleted from {done} queue{'' if done == 1 else 's'}."
        if done < len(rows):
            text += f" {len(rows) - done} skipped: a live worker consumes it, or may."
        self.message_user(request, text, messages.SUCCESS if done == len(rows) else messages.WARNING)
        return None


def _purge(alias: str, name: str) -> int | None:
    return declared.purge(alias, name)


def _delete(alias: str, name: str) -> int | None:
    consumed = consumed_queues(alias)
    return None if consumed is None or name in consumed else declared.delete(alias, name)


def _binding(exchange: str, key: str, max_length: int) -> SafeString:
    shown = untrusted.inline(exchange, max_length)
    return format_html("{} [{}]", shown, untrusted.inline(key, max_length)) if key else shown


#: Badge colour of each state; a custom state of a task counts as running.
_TONES: dict[str, display.Tone] = {
    "PENDING": "quiet", "RECEIVED": "quiet", "STARTED": "busy", "SUCCESS": "good", "FAILURE": "bad", "REVOKED": "warn",
    "RETRY": "warn",
}  # fmt: skip
NOT_ALLOWED = "You may not view the bodies of Celery messages."
_LARGE = ("result", "traceback", "children", "args", "kwargs", "meta")


class StateFilter(BoundedFilter):
    """Filters by Celery's own states."""

    title = "state"
    parameter_name = "status"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(state, state.lower()) for state in ("STARTED", "SUCCESS", "FAILURE", "RETRY", "REVOKED")]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return queryset if self.value() is None else queryset.filter(status=self.value())


@admin.register(CeleryResult)
class CeleryResultAdmin(ResultsAdmin):
    """The results of tasks, newest first."""

    title = "Celery results"
    list_order = "-number"
    list_display = ("celery_state", "celery_task", "ran_on", "began", "ended")
    list_display_links = ("celery_state",)
    list_filter = (DatabaseFilter, StateFilter)
    ordering = ("-number",)
    search_help_text = "The id of a task."
    readonly_fields = (
        "celery_task", "celery_state", "ran_on", "began", "ended", "expires", "retries", "arguments",
        "returned", "raised", "sent", "more",
    )  # fmt: skip
    fields = readonly_fields

    # -- the list ------------------------------------------------------------------------------------------------------

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        return self._rows(super().get_queryset(request)).defer(*_LARGE)

    @staticmethod
    def _rows(rows: QuerySet[Any]) -> QuerySet[Any]:
        return nonblocking(rows).annotate(db_now=Now(output_field=UtcField()))

    def prepare_rows(self, rows: list[Any]) -> None:
        """No further columns."""

    def is_key(self, value: str) -> bool:
        return value.isdecimal()

    def get_search_results(self, request: HttpRequest, queryset: QuerySet[Any], search_term: str) -> tuple[Any, bool]:
        term = search_term.strip()
        if not term:
            return queryset, False
        sought = len(term) <= MAX_ID_LENGTH and "\0" not in term
        return (queryset.filter(task_id=term) if sought else queryset.none()), False

    # -- the detail page -----------------------------------------------------------------------------------------------

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Any:
        alias, primary = self.place_of(object_id)
        if not primary.isdecimal() or len(primary) > 18:
            return None
        row = self._rows(super().get_queryset(request)).using(alias).filter(pk=int(primary)).first()
        if row is not None:
            row.shows_values = may_view(self.admin_site, request, BrokerQueue._meta.label)
        return row

    # -- columns and fields --------------------------------------------------------------------------------------------

    @admin.display(description="state")
    def celery_state(self, row: CeleryResult) -> SafeString:
        badge = display.badge(_TONES.get(row.status, "busy"), untrusted.inline(row.status.lower(), 16))
        return display.below(badge, f"retries: {row.retries}" if row.retries else "")

    @admin.display(description="task")
    def celery_task(self, row: CeleryResult) -> SafeString:
        return display.below(
            untrusted.inline(row.name, 120) if row.name else display.NOTHING, untrusted.inline(row.task_id, 60)
        )

    @admin.display(description="ran on")
    def ran_on(self, row: CeleryResult) -> SafeString:
        worker = untrusted.inline(row.worker, 80) if row.worker else display.NOTHING
        return display.below(worker, untrusted.inline(row.queue, 60) if row.queue else "")

    @admin.display(description="first state")
    def began(self, row: Any) -> Any:
        return display.ago(row.created_at, row.db_now)

    @admin.display(description="ended")
    def ended(self, row: Any) -> Any:
        return display.ago(row.date_done, row.db_now)

    @admin.display(description="expires")
    def expires(self, row: Any) -> Any:
        return "never" if row.expires_at is None else display.ago(row.expires_at, row.db_now)

    @admin.display(description="arguments")
    def arguments(self, row: Any) -> Any:
        if not row.shows_values:
            return NOT_ALLOWED
        if row.args is None and row.kwargs is None:
            return "Not stored: result_extended is off."
        return format_html_join("", "{}", ((_block(part),) for part in (row.args, row.kwargs) if part is not None))

    @admin.display(description="result")
    def returned(self, row: Any) -> Any:
        if not row.shows_values:
            return NOT_ALLOWED
        return _block(row.result)

    @admin.display(description="traceback")
    def raised(self, row: CeleryResult) -> Any:
        return _block(row.traceback)

    @admin.display(description="child tasks")
    def sent(self, row: CeleryResult) -> Any:
        return _block(row.children)

    @admin.display(description="further data")
    def more(self, row: CeleryResult) -> Any:
        return _block(row.meta)


def _block(text: str | None) -> SafeString:
    """Formatted JSON, or the text; bounded."""
    if not text:
        return display.NOTHING
    whole = text.encode("utf-8", "replace")
    return untrusted.block(untrusted.body(whole[: untrusted.SHOWN], len(whole)))


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
        return untrusted.block(untrusted.body(whole[: untrusted.SHOWN], len(whole)))

    @admin.display(description="body")
    def content(self, row: Any) -> SafeString | str:
        if not row.shows_body:
            return "You may not view the bodies of this queue."
        whole = None if row.body is None else bytes(row.body)
        return untrusted.block(
            untrusted.body(whole and whole[: untrusted.SHOWN], None if whole is None else len(whole))
        )
