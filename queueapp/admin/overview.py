"""The overview of all queues, with a button for each operation on a whole queue (see ``queue_operations``).

The admin's index lists it as "Queues": it is the list page of ``QueueControl``. A row has no page of its own, only a
history. Every button is a POST with a CSRF token and needs ``queueapp.operate_queue``.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from django.contrib import messages
from django.contrib.admin.utils import quote, unquote
from django.core.exceptions import PermissionDenied
from django.db import DatabaseError, InterfaceError, router, transaction
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import path, reverse
from django.utils.html import format_html
from django.utils.http import urlencode
from django.utils.safestring import SafeString

from .. import overrides, registry
from ..errors import QueueNotFound
from ..models import BulkOperation, DelayedMessage, PoisonMessage, QueueControl, Schedule, Subscriber
from ..operations import snapshots
from ..operations.statistics import breaker_text
from ..sending.validation import alias_of
from .database_page import health_view, long_transactions
from .databases import PARAMETER, Named, note_of
from .formatting import charts, display, untrusted
from .operations import Options, ask
from .overview_findings import Finding, findings
from .overview_rows import HEADINGS, OverviewRow, overview
from .queue_operations import OPERATIONS, QueueOperation
from .queue_page import queue_view
from .read_only import OPERATE, ReadOnlyAdmin
from .search_page import search_view

#: The header with which the page's script asks for its rows only.
PART = "X-Queueapp-Part"
#: Figures older than this are marked: a snapshot is taken at least once a minute.
OLD_SECONDS = 90.0


class OverviewAdmin(ReadOnlyAdmin):
    """All queues of this process on one page."""

    actions = None

    # -- permissions ----------------------------------------------------------------------------------------------

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return request.user.has_perm(OPERATE) or super().has_view_permission(request, obj)

    # -- pages ----------------------------------------------------------------------------------------------------

    def get_urls(self) -> list[Any]:
        name = f"{self.opts.app_label}_{self.opts.model_name}"
        views = {verb: self.admin_site.admin_view(partial(self.operate_view, verb=verb)) for verb in OPERATIONS}
        urls = [path(f"<str:label>/{verb}/", view, name=f"{name}_{verb}") for verb, view in views.items()]
        charts_view = self.admin_site.admin_view(partial(queue_view, self))
        urls.append(path("<str:label>/charts/", charts_view, name=f"{name}_charts"))
        databases = self.admin_site.admin_view(partial(health_view, self))
        urls.append(path("databases/", databases, name=f"{name}_databases"))
        urls.append(path("search/", self.admin_site.admin_view(partial(search_view, self)), name=f"{name}_search"))
        # Django's pages to add and delete are not ours.
        kept = ("_changelist", "_history", "_change")
        return [*urls, *(url for url in super().get_urls() if str(url.name).endswith(kept))]

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        """The overview."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        if request.method not in ("GET", "HEAD"):
            raise PermissionDenied
        found = overview()
        # Headers are for users who may see the messages.
        readable = frozenset(row.label for row in found.rows if self._messages_of(request, row) is not None)
        further = findings(found.rows, bool(self._list_of(request, PoisonMessage)), readable)
        lines = [self._line(request, row, further.get(row.label, ())) for row in found.rows]
        part = PART in request.headers
        context = {
            **({} if part else self.admin_site.each_context(request)),
            "age": found.age,
            "age_text": "" if found.age is None else display.of_seconds(found.age),
            "is_old": found.age is not None and found.age > OLD_SECONDS,
            "part_header": PART,
            "headings": (*HEADINGS, "Operate" if request.user.has_perm(OPERATE) else "History"),
            "warnings": long_transactions(sorted({row.alias for row in found.rows if row.stats.waiting is not None})),
            "search_url": self._url("search"),
            "databases_url": self._url("databases"),
            "links": self._links(request),
            "title": "Queues",
            "opts": self.opts,
            "media": self.media,
            "lines": lines,
            "may_operate": request.user.has_perm(OPERATE),
            "several_databases": len({line["row"].alias for line in lines}) > 1,
            **(extra_context or {}),
        }
        request.current_app = self.admin_site.name  # type: ignore[attr-defined]
        template = "admin/queueapp/overview_rows.html" if part else "admin/queueapp/overview.html"
        return TemplateResponse(request, template, context, headers={"Vary": PART})

    def _links(self, request: HttpRequest) -> list[tuple[str, str]]:
        """(address, text) of the pages that go with this one."""
        lists = [(self._list_of(request, Schedule), "Schedules"), (self._list_of(request, BulkOperation), "Operations")]
        return [(self._url("databases"), "Databases"), *((address, text) for address, text in lists if address)]

    def change_view(self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: Any = None) -> Any:
        """Django's log links here; the overview is the page of every queue."""
        if request.method not in ("GET", "HEAD") or not self.has_view_permission(request):
            raise PermissionDenied
        return HttpResponseRedirect(self._url("changelist"))

    def operate_view(self, request: HttpRequest, label: str, verb: str) -> HttpResponse:
        """Carry one operation out on one queue, after confirmation. POST only."""
        if not request.user.has_perm(OPERATE):
            raise PermissionDenied
        try:
            queue = registry.queues.find(label)
        except QueueNotFound:
            raise Http404(f"There is no queue {label}.") from None
        if request.method != "POST":
            return HttpResponse(status=405, headers={"Allow": "POST"})
        alias = alias_of(queue)
        try:
            # The confirm page is read within a savepoint, as in or_note.
            with nullcontext() if "confirmed" in request.POST else transaction.atomic(using=alias):
                return self._operate(request, queue, OPERATIONS[verb])
        except (DatabaseError, InterfaceError) as error:
            cause = note_of(error, alias, queue._meta.db_table)
            if not cause:
                raise
            self.message_user(request, f"Queue {queue._meta.label}: {cause}", messages.ERROR)
        return HttpResponseRedirect(self._url("changelist"))

    def _operate(self, request: HttpRequest, queue: Any, operation: QueueOperation) -> HttpResponse:
        confirmed = "confirmed" in request.POST
        options = operation.options_of(queue) if operation.options_of is not None else operation.options
        form = options(request.POST) if confirmed else options(initial=operation.initial(queue))
        if not confirmed or not form.is_valid():
            return self._ask(request, queue, operation, form)
        text, level = operation.run(queue, request.user, form.cleaned_data)
        snapshots.forget(queue)
        self.message_user(request, text, level)
        return HttpResponseRedirect(self._url("changelist"))

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Any:
        """The object of the history page, which a queue has even if no option was ever set for it."""
        try:
            return QueueControl(queue=registry.queues.find(object_id)._meta.label)
        except QueueNotFound:
            return None

    def history_view(self, request: HttpRequest, object_id: str, extra_context: Any = None) -> HttpResponse:
        """The log entries of a queue."""
        # The label alone: str() of the object would say "running" without having read the row.
        label = unquote(object_id)
        named = {"title": f"History of {label}", "object": Named(label, label)}
        return super().history_view(request, object_id, {**named, **(extra_context or {})})

    # -- rows -----------------------------------------------------------------------------------------------------

    def _line(self, request: HttpRequest, row: OverviewRow, found: Iterable[Finding] = ()) -> dict[str, Any]:
        label = row.label
        urls = {"poison": self._list_of(request, PoisonMessage, row.alias, queue=label),
                "charts": "" if row.queue is None else self._url("charts", label)}  # fmt: skip
        return {
            "row": row,
            "link": display.queue_link(label, row.queue, self.admin_site, request),
            "state": display.badge(*row.state),
            "set": self._set(row),
            "spark": self._spark(row),
            "oldest": display.duration(row.oldest) if row.oldest is not None else "",
            "notes": [
                *self._longest(request, row),
                *(untrusted.inline(text, 300) for text in self._notes(row)),
                *(display.with_link(finding.text, urls[finding.page], finding.link) for finding in found),
            ],
            "delayed_url": self._list_of(request, DelayedMessage, row.alias, destination=label),
            "poison_url": urls["poison"],
            "workers_url": self._list_of(request, Subscriber, row.alias, queue=label),
            **({} if row.queue is None else self.of_known_queue(row)),
        }

    def _spark(self, row: OverviewRow) -> SafeString:
        series = [(point.at, point.ready) for point in row.history]
        drawn = charts.sparkline(series, datetime.now(UTC), timedelta(hours=1), "ready in the last hour")
        if row.queue is None or not row.history:
            return drawn
        return format_html('<a href="{}">{}</a>', self._url("charts", row.label), drawn)

    def of_known_queue(self, row: OverviewRow) -> dict[str, Any]:
        """The links of a row."""
        # Only for known queues: the name of an unknown one comes from a message, and no URL need match it.
        verbs = ("resume" if row.paused else "pause", "concurrency", "limits", "purge")
        return {
            "history_url": self._url("history", quote(row.label)),
            "charts_url": self._url("charts", row.label),
            "operations": [(OPERATIONS[verb], self._url(verb, row.label)) for verb in verbs],
        }

    def _messages_of(self, request: HttpRequest, row: OverviewRow) -> Any:
        """The page of a queue's messages; None, if the user may not see it."""
        page = None if row.queue is None else self.admin_site._registry.get(row.queue)
        return page if page is not None and page.has_view_permission(request) else None

    def _longest(self, request: HttpRequest, row: OverviewRow) -> list[Any]:
        stats, page = row.stats, self._messages_of(request, row)
        if not stats.longest_handler:
            return []
        text = f"{stats.longest_handler} has run for {display.of_seconds(stats.longest_handler_seconds)}"
        shown = untrusted.inline(text, 300)
        if page is None or stats.longest_handler_seq is None:
            return [shown]
        return [display.with_link(shown, page.url_in(row.alias, stats.longest_handler_seq), "Message")]

    @staticmethod
    def _notes(row: OverviewRow) -> list[str]:
        stats = row.stats
        unroutable = [
            f"{finding}; the oldest is {display.of_seconds(finding.oldest_seconds)} old" for finding in stats.unroutable
        ]
        consumers = map(str, stats.consumers_without_worker)
        texts = (stats.error, stats.note, *map(breaker_text, stats.breakers), *unroutable, *consumers)
        return [text for text in texts if text]

    @staticmethod
    def _set(row: OverviewRow) -> list[Any]:
        """The options that operators have set, who changed them last, and when."""
        if row.control is None:
            return []
        concurrency = row.control.concurrency
        by, at = f"by {row.changed_by or 'a script'}", display.moment(row.control.changed_at)
        values = ((name, getattr(row.control, name)) for name in overrides.SETTABLE)
        options = [
            f"{name.replace('_', ' ')} {display.in_full(value) if isinstance(value, timedelta) else value}"
            for name, value in values
            if value is not None
        ]
        receivers = [f"{display.receivers(concurrency)} per process"] if concurrency is not None else []
        return [*receivers, *options, by, at]

    def _ask(self, request: HttpRequest, queue: Any, operation: QueueOperation, form: Options) -> HttpResponse:
        label = queue._meta.label
        return ask(
            self,
            request,
            title=operation.title(queue),
            explanation=operation.explanation,
            few=[],
            hidden=[],
            form=form,
            yes=operation.answer or f"{operation.label} {label}",
            dangerous=operation.dangerous,
            post_to=self._url(operation.name, label),
            back_to=self._url("changelist"),
        )

    def _url(self, page: str, *args: Any) -> str:
        return reverse(f"{self.admin_site.name}:{self.opts.app_label}_{self.opts.model_name}_{page}", args=args)

    def _list_of(self, request: HttpRequest, model: Any, alias: str | None = None, **filters: str) -> str:
        """The URL of another list, filtered, for one database (None: its first); '' if the user may not see it."""
        page = self.admin_site._registry.get(model)
        if page is None or not page.has_view_permission(request):
            return ""
        meta = model._meta
        url = reverse(f"{self.admin_site.name}:{meta.app_label}_{meta.model_name}_changelist")
        if alias is not None and alias != router.db_for_write(model):
            filters[PARAMETER] = alias
        return f"{url}?{urlencode(filters)}" if filters else url
