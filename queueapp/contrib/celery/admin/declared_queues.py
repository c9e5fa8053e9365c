"""The queues that programs on kombu have declared: what waits in each, who takes it, what is bound to it, and how it goes.

Code declares them, and their names are a stranger's. What is done to one is in its history.
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
from django.utils.html import format_html
from django.utils.safestring import SafeString

from ....admin.databases import DatabaseFilter, OfDatabases, StrictChangeList
from ....admin.formatting import display, untrusted
from ....admin.operations import ask, is_gone, log_entry
from ....admin.read_only import ReadOnlyAdmin
from ....models import Now, UtcField
from ....operations.live_workers import live_on
from ....sql import nonblocking
from .. import topology as declared
from ..models import BrokerQueue, DeclaredQueue

OPERATE, DELETE = "queueapp.operate_queue", "queueapp_celery.delete_declaredqueue"
LABEL = BrokerQueue._meta.label
#: Messages of a queue that a page counts; bindings that it names; queues that the confirm page names.
COUNTED, BOUND, NAMED = 1000, 100, 10


class Figures:
    """What is in one queue: counted among so many of its messages."""

    def __init__(self, alias: str, name: str) -> None:
        some = nonblocking(BrokerQueue.objects.using(alias).filter(recipient=name)).order_by()[:COUNTED]
        live = Q(lease_expires__gte=Now())
        found = some.aggregate(all=Count("pk"), leased=Count("pk", filter=live))
        self.leased = found["leased"]
        self.waiting = found["all"] - self.leased
        self.more = found["all"] == COUNTED
        self.delayed = nonblocking(declared.delayed(alias, name)).order_by()[:COUNTED].count()
        self.bindings = declared.bindings_of(alias, name)


class DeclaredQueueList(StrictChangeList):
    """The list, with what is in each of the queues that it shows."""

    def get_results(self, request: HttpRequest) -> None:
        """Django's, and the figures of the rows that it shows."""
        super().get_results(request)
        rows = list(self.result_list)
        alias = self.model_admin.database(request)
        served = served_in(alias)
        for row in rows:
            row.figures, row.served = Figures(alias, row.pk), served
        self.result_list = rows


def served_in(alias: str) -> set[str] | None:
    """The queues that live workers take from; None: one of them does not say."""
    return live_on(alias, [LABEL])[LABEL].recipients


@admin.register(DeclaredQueue)
class DeclaredQueueAdmin(ReadOnlyAdmin, OfDatabases):
    """One row a queue. It goes by ``delete_queues``: Django's page for that would leave what is in it."""

    show_facets = admin.ShowFacets.NEVER
    list_display = ("queue_name", "waiting", "taken", "bound", "goes")
    list_display_links = ("queue_name",)
    list_filter = (DatabaseFilter,)
    list_per_page = 50
    ordering = ("name",)
    search_fields = ("name",)
    search_help_text = "A name, or its beginning."
    actions = ("purge", "delete_queues")
    readonly_fields = ("queue_name", "waiting", "taken", "bindings", "goes", "message_ttl", "declared_with", "declared")
    fields = readonly_fields

    # -- permissions -----------------------------------------------------------------------------------------------

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return request.user.has_perm(OPERATE) or super().has_view_permission(request, obj)

    def has_operate_permission(self, request: HttpRequest) -> bool:
        """Purging, as of any queue."""
        return request.user.has_perm(OPERATE)

    def has_delete_queue_permission(self, request: HttpRequest) -> bool:
        """Deleting a queue: Django's delete permission."""
        return request.user.has_perm(DELETE)

    # -- where a row is: a name may have a colon in it -------------------------------------------------------------

    def key_of(self, row: Any) -> str:
        """Always with its database."""
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
        """Only what the filter offers."""
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
        show, alias = super().change_view, self.place_of(unquote(object_id))[0]
        name = f"{self.admin_site.name}:{self.opts.app_label}_{self.opts.model_name}_history"
        # Django's own link would leave out the database.
        context = {"history_url": reverse(name, args=(object_id,)), **(extra_context or {})}
        return self.or_note(request, alias, lambda: show(request, object_id, form_url, context))

    def history_view(self, request: HttpRequest, object_id: str, extra_context: Any = None) -> HttpResponse:
        """Who did what to one queue, and when."""
        show, alias = super().history_view, self.place_of(unquote(object_id))[0]
        return self.or_note(request, alias, lambda: show(request, object_id, extra_context))

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Any:
        alias, name = self.place_of(object_id)
        row = self.get_queryset(request).using(alias).filter(pk=name).first()
        if row is not None:
            row.figures, row.served = Figures(alias, name), served_in(alias)
        return row

    # -- columns and fields ----------------------------------------------------------------------------------------

    @admin.display(description="queue", ordering="name")
    def queue_name(self, row: DeclaredQueue) -> SafeString:
        kinds = [word for word, said in (("durable", row.durable), ("auto-delete", row.auto_delete)) if said]
        return display.below(untrusted.inline(row.name, 80), ", ".join(kinds))

    @admin.display(description="waiting, leased")
    def waiting(self, row: Any) -> SafeString:
        of: Figures = row.figures
        plus = "+" if of.more else ""
        delayed = f"{of.delayed:,}{'+' if of.delayed == COUNTED else ''} delayed" if of.delayed else ""
        return display.below(f"{of.waiting:,}{plus}", f"{of.leased:,}{plus} leased" if of.leased else "", delayed)

    @admin.display(description="taken")
    def taken(self, row: Any) -> SafeString:
        if row.served is None:
            return display.badge("quiet", "not known")
        return display.badge("good", "served") if row.name in row.served else display.badge("quiet", "no live worker")

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
        # One line each, whatever is in its names.
        lines = [" ".join(f"{exchange} [{key}]".split()) for exchange, key in found[:BOUND]]
        if len(found) > BOUND:
            lines.append(f"and {len(found) - BOUND:,} more")
        return format_html('<pre class="queueapp-text">{}</pre>', untrusted.text("\n".join(lines)).text)

    @admin.display(description="goes by itself", ordering="expires_at")
    def goes(self, row: Any) -> Any:
        return "never" if row.expires_at is None else display.ago(row.expires_at, row.db_now)

    @admin.display(description="a message may wait")
    def message_ttl(self, row: DeclaredQueue) -> str:
        return "without end" if row.message_ttl_ms is None else f"{row.message_ttl_ms / 1000:,.3f} s"

    @admin.display(description="arguments")
    def declared_with(self, row: DeclaredQueue) -> SafeString:
        try:
            text = json.dumps(json.loads(row.arguments), indent=2, ensure_ascii=False)
        except (ValueError, RecursionError):
            text = row.arguments
        return format_html('<pre class="queueapp-text">{}</pre>', untrusted.text(text).text)

    @admin.display(description="declared")
    def declared(self, row: Any) -> Any:
        return display.ago(row.declared_at, row.db_now)

    # -- what can be done ------------------------------------------------------------------------------------------

    @admin.action(description="Purge", permissions=["operate"])
    def purge(self, request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponse | None:
        """Delete what waits in these queues."""
        explanation = "Every message that waits there, delayed ones too, is deleted for good. What a worker has stays."
        return self._do(request, queryset, "purge", "Purge", explanation, _purge, CHANGE)

    @admin.action(description="Delete", permissions=["delete_queue"])
    def delete_queues(self, request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponse | None:
        """Delete queues that nobody takes from."""
        explanation = (
            "What is chosen goes for good, with its bindings and every message in it, delayed ones too. A queue that a live worker "
            "takes from is left alone. Programs that publish to one by an exchange have to declare it again, or what they publish "
            "is dropped."
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
        several = f"{len(rows)} queue{'' if len(rows) == 1 else 's'}"
        if "confirmed" not in request.POST:
            return ask(
                self, request, title=f"{label} {several}?", explanation=explanation,
                few=[untrusted.inline(row.name, 200) for row in rows[:NAMED]],
                more=str(len(rows) - NAMED) if len(rows) > NAMED else "",
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
            text += f" {len(rows) - done} left alone: a live worker takes from it, or may."
        self.message_user(request, text, messages.SUCCESS if done == len(rows) else messages.WARNING)
        return None


def _purge(alias: str, name: str) -> int | None:
    return declared.purge(alias, name)


def _delete(alias: str, name: str) -> int | None:
    served = served_in(alias)
    return None if served is None or name in served else declared.delete(alias, name)


def _binding(exchange: str, key: str, longest: int) -> SafeString:
    of = untrusted.inline(exchange, longest)
    return format_html("{} [{}]", of, untrusted.inline(key, longest)) if key else of
