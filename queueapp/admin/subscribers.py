"""The worker processes: whether each is alive, what it handles at present, and how much it has handled.

A tree of processes can be asked to stop; nothing else can be changed.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.utils import unquote
from django.core.exceptions import PermissionDenied
from django.db.models import Exists, OuterRef, Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

from ..messages import as_uuid
from ..models import DISPATCHER, MAINTENANCE, NO_QUEUES, Leader, Now, QueueControl, Subscriber, UtcField
from ..models.subscribers import parse_json_list
from ..operations import control, live_workers
from ..operations.running_handlers import progress_in
from ..operations.statistics import breaker_text
from .databases import DatabaseFilter, OfDatabases, StrictChangeList
from .formatting import display, untrusted
from .operations import Options, ask, log_entry
from .read_only import OPERATE, ReadOnlyAdmin


class AliveFilter(admin.SimpleListFilter):
    title = "alive"
    parameter_name = "alive"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [("yes", "alive"), ("no", "dead")]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        if self.value() == "yes":
            return queryset.filter(alive_until__gt=Now())
        return queryset.filter(alive_until__lte=Now()) if self.value() == "no" else queryset


#: What makes rows those of one process: a process id is used again, also on another host.
_PROCESS = ("host", "process", "process_start", "supervisor")
#: How long the page names workers that have died.
SHOWN_DEATHS = timedelta(days=1)
#: Queues of a process that the list names.
SHOWN_QUEUES = 5


class ProcessList(StrictChangeList):
    """The list with one row per process: the first of its rows that match, with all rows of the process beside it."""

    def get_queryset(self, request: HttpRequest, exclude_parameters: Any = None) -> QuerySet[Any]:
        rows = super().get_queryset(request, exclude_parameters)
        earlier = Q(queue__lt=OuterRef("queue")) | Q(queue=OuterRef("queue"), pk__lt=OuterRef("pk"))
        same = {name: OuterRef(name) for name in _PROCESS}
        return rows.filter(~Exists(rows.order_by().filter(earlier, **same)))

    def get_results(self, request: HttpRequest) -> None:
        """Django's result, plus the rows of each process."""
        super().get_results(request)
        shown = list(self.result_list)
        rows = self.root_queryset.filter(
            host__in={row.host for row in shown}, process__in={row.process for row in shown}
        )
        by_process: dict[tuple[Any, ...], list[Any]] = {}
        for row in rows.order_by("queue", "pk") if shown else ():
            by_process.setdefault(tuple(getattr(row, name) for name in _PROCESS), []).append(row)
        for row in shown:
            row.of_process = by_process.get(tuple(getattr(row, name) for name in _PROCESS), [row])
        elected = _elected(self.root_queryset.db) if shown else set()
        for row in shown:
            name = uuid.uuid5(row.supervisor, row._state.db)
            row.elected = {duty for duty in NO_QUEUES if (duty, name) in elected}
        self.result_list = shown


def _elected(alias: str) -> set[tuple[str, uuid.UUID]]:
    """The elected processes: their duties and their names in the election, made from those of their trees."""
    leaders = Leader.objects.using(alias).filter(expires__gt=Now()).values_list("role", "holder")
    return {
        (duty, as_uuid(holder))
        for role, holder in leaders
        for duty, start in ((DISPATCHER, "delayed dispatcher "), (MAINTENANCE, "maintenance "))
        if role.startswith(start)
    }


class SubscriberAdmin(ReadOnlyAdmin, OfDatabases):
    """One row per worker process, with a page for each of its queues. Rows cannot be deleted here: a live worker
    without its row counts as dead and loses its leases. Maintenance deletes the rows of dead workers."""

    actions = ("stop_gracefully",)
    change_list_template = "admin/queueapp/workers.html"
    show_facets = admin.ShowFacets.NEVER
    list_display = ("holder", "queue_names", "state", "started", "counts")
    list_display_links = ("holder",)
    list_filter = (DatabaseFilter, AliveFilter, ("queue", admin.AllValuesFieldListFilter))
    ordering = ("queue", "host", "process")
    _of_every_process = ("queue_name", "holder", "state", "heartbeat", "started", "id", "supervisor", "open_breakers")
    _of_receivers = (
        "running_lines",
        "progress_lines",
        "consumer_lines",
        "unknown_type_lines",
        "concurrency",
        "filter_text",
        "backlog",
        "outstanding",
        "leases_lost",
        "received",
        "handled",
        "failed",
    )
    readonly_fields = (*_of_every_process, *_of_receivers)

    def get_fields(self, request: HttpRequest, obj: Any = None) -> tuple[str, ...]:
        """A process that only dispatches or runs maintenance receives nothing, so its zeros are left out."""
        return self._of_every_process if obj is not None and obj.queue in NO_QUEUES else self.readonly_fields

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest | None = None) -> bool:
        """Only what the filters offer: an invalid regular expression in a URL would be a database error."""
        return lookup in {DatabaseFilter.parameter_name, AliveFilter.parameter_name, "queue", "queue__isnull"}

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[StrictChangeList]:
        return ProcessList

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        return super().get_queryset(request).annotate(db_now=Now(output_field=UtcField()))

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Any:
        alias, primary = self.place_of(object_id)
        try:
            return self.get_queryset(request).using(alias).filter(pk=uuid.UUID(primary)).first()
        except ValueError:
            return None

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        show, alias = super().changelist_view, self.database(request)
        context = {"title": "Workers", **(extra_context or {})}

        def page() -> HttpResponse:
            deaths = _deaths(alias) if request.method == "GET" else []
            return show(request, {**context, "deaths": deaths})

        return self.or_note(request, alias, page)

    def has_operate_permission(self, request: HttpRequest) -> bool:
        """Stopping processes: ``operate_queue``."""
        return bool(request.user.has_perm(OPERATE))

    @admin.action(description="Stop gracefully", permissions=["operate"])
    def stop_gracefully(self, request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponse | None:
        """Ask the trees of these processes to stop, after confirmation."""
        rows = list(queryset.exclude(queue__in=NO_QUEUES).order_by("host", "process"))
        trees = {row.supervisor: row for row in rows}
        if not trees:
            text = "Nothing was changed: these processes are gone, or receive nothing. Stop them where they run."
            self.message_user(request, text, messages.WARNING)
            return None
        if "confirmed" not in request.POST:
            return ask(
                self, request,
                title=f"Stop {display.counted(len(trees), 'tree', 'trees')} of worker processes?",
                explanation="All processes of the same runqueueworker stop receiving within a heartbeat, and running "
                "handlers get SHUTDOWN_GRACE; what they have not begun is released. What has started the tree "
                "(systemd, Kubernetes) may start it again.",
                few=[untrusted.inline(f"{row.host}:{row.process}", 200) for row in trees.values()],
                hidden=[("action", "stop_gracefully"), *((ACTION_CHECKBOX_NAME, row.pk) for row in trees.values())],
                form=Options(), yes="Stop gracefully", dangerous=True,
                post_to=request.get_full_path(), back_to=self.list_url(queryset.db),
            )  # fmt: skip
        stopped = [row for key, row in trees.items() if control.stop_workers(key, using=queryset.db)]
        for row in stopped:
            log_entry(self, request, "Asked to stop.", row=row).save()
        text = f"{display.counted(len(stopped), 'tree', 'trees')} asked to stop."
        self.message_user(request, text, messages.SUCCESS if len(stopped) == len(trees) else messages.WARNING)
        return None

    def history_view(self, request: HttpRequest, object_id: str, extra_context: Any = None) -> HttpResponse:
        """Django's log links here; there are no operations on processes."""
        show, alias = super().history_view, self.place_of(unquote(object_id))[0]
        return self.or_note(request, alias, lambda: show(request, object_id, extra_context))

    def delete_view(self, request: HttpRequest, object_id: str, extra_context: Any = None) -> HttpResponse:
        """Never."""
        raise PermissionDenied

    def action_checkbox(self, obj: Any) -> Any:
        """The check box of a row. Django's has the name of the host in its label as it is."""
        box = '<input type="checkbox" name="{}" value="{}" class="action-select" aria-label="Select {}">'
        return format_html(box, ACTION_CHECKBOX_NAME, obj.pk, untrusted.visible(f"{obj.host}:{obj.process}")[:100])

    @admin.display(description="queue", ordering="queue")
    def queue_name(self, row: Subscriber) -> SafeString:
        return untrusted.inline(row.queue)

    @admin.display(description="process", ordering="host")
    def holder(self, row: Subscriber) -> SafeString:
        rows = _of_process(row)
        version = untrusted.inline(row.version) if row.version else ""
        memory = next((display.size(item.memory) for item in rows if item.memory), "")
        restarts = max(item.restarts for item in rows)
        again = display.counted(restarts, "restart", "restarts") if restarts else ""
        return display.below(untrusted.inline(f"{row.host}:{row.process}"), version, memory, again)

    @admin.display(description="state", ordering="alive_until")
    def state(self, row: Any) -> SafeString:
        stops = any(subscriber.stop_requested for subscriber in _of_process(row))
        row = max(_of_process(row), key=lambda subscriber: subscriber.alive_until)
        remaining = row.alive_until - row.db_now
        if remaining.total_seconds() > 0:
            beat = display.duration(row.db_now - row.heartbeat_at)
            badge = display.badge("warn", "asked to stop") if stops else display.badge("good", "alive")
            return display.below(badge, f"heartbeat {beat} ago")
        return display.below(
            display.badge("bad", f"dead for {display.duration(remaining)}"), display.moment(row.heartbeat_at)
        )

    @admin.display(description="queues, receivers")
    def queue_names(self, row: Any) -> SafeString:
        rows = _of_process(row)
        more = f"and {len(rows) - SHOWN_QUEUES} more" if len(rows) > SHOWN_QUEUES else ""
        elected: set[str] = getattr(row, "elected", set())
        lines = [line for item in rows[:SHOWN_QUEUES] for line in self._queue_lines(item, item.queue in elected)]
        return display.below(*lines, more)

    def _queue_lines(self, row: Any, is_elected: bool) -> list[SafeString | str]:
        """The queue, linked to its page, and what the process does for it."""
        link = format_html('<a href="{}">{}</a>', self.url_of(row), untrusted.inline(row.queue))
        if row.queue in NO_QUEUES:
            return [format_html("{} {}", link, display.badge("good", "elected")) if is_elected else link]
        limit = "" if row.backlog is None else f" of {row.backlog:,}"
        text = f"{display.receivers(row.concurrency)}, {row.outstanding:,}{limit} in flight"
        filtered = untrusted.inline(row.filter, 100) if row.filter else ""
        progress = [untrusted.inline(line, 100) for line in _progress(row)]
        return [link, text, filtered, *self._running(row)[:3], *progress[:3]]

    @admin.display(description="running messages")
    def running_lines(self, row: Any) -> SafeString | str:
        """The handlers that have run for more than a second, the longest first."""
        lines = self._running(row)
        return display.below(*lines) if lines else display.NOTHING

    def _running(self, row: Any) -> list[SafeString]:
        since = max(timedelta(0), row.db_now - row.heartbeat_at) if _is_alive(row) else timedelta(0)
        lines = []
        for seq, consumer, seconds in live_workers.running_of(row.running):
            elapsed = timedelta(seconds=seconds) + since
            name = untrusted.inline(consumer, 60)
            text = format_html("message {} in {} for {}", seq, name, display.duration(elapsed))
            is_long = elapsed > live_workers.LONG_RUNNING
            lines.append(format_html('<span class="queueapp-problem">{}</span>', text) if is_long else text)
        return lines

    @admin.display(description="progress")
    def progress_lines(self, row: Subscriber) -> SafeString | str:
        """The progress of handlers that report it."""
        lines = [untrusted.inline(text) for text in _progress(row)]
        return display.below(*lines) if lines else display.NOTHING

    @admin.display(description="open breakers")
    def open_breakers(self, row: Subscriber) -> SafeString | str:
        """Its circuit breakers that are not closed."""
        return _lines(breaker_text(breaker) for breaker in live_workers.breakers_of(row.breakers))

    @admin.display(description="consumers, and the types they take")
    def consumer_lines(self, row: Subscriber) -> SafeString | str:
        return _lines(
            f"{name}: {kind or 'messages without a type'}" for name, kind in live_workers.consumers_of(row.consumers)
        )

    @admin.display(description="unknown types that it met")
    def unknown_type_lines(self, row: Subscriber) -> SafeString | str:
        return _lines(str(kind) or "no type" for kind in parse_json_list(row.unknown_types))

    @admin.display(description="filter")
    def filter_text(self, row: Subscriber) -> SafeString | str:
        return untrusted.inline(row.filter) if row.filter else display.NOTHING

    @admin.display(description="messages", ordering="received")
    def counts(self, row: Subscriber) -> SafeString | str:
        rows = [subscriber for subscriber in _of_process(row) if subscriber.queue not in NO_QUEUES]
        if not rows:
            return display.NOTHING  # it receives nothing
        handled, received, failed = (
            sum(getattr(row, name) for row in rows) for name in ("handled", "received", "failed")
        )
        return display.below(f"{handled:,} handled", f"{received:,} received", f"{failed:,} failed" if failed else "")

    @admin.display(description="heartbeat", ordering="heartbeat_at")
    def heartbeat(self, row: Any) -> Any:
        return display.ago(row.heartbeat_at, row.db_now)

    @admin.display(description="started", ordering="started_at")
    def started(self, row: Any) -> Any:
        return display.ago(row.started_at, row.db_now)


def _lines(texts: Iterable[str]) -> SafeString | str:
    """A line for each text; a dash without any."""
    shown = [untrusted.inline(text, 300) for text in texts]
    return format_html_join("", "<div>{}</div>", ((text,) for text in shown)) if shown else display.NOTHING


def _of_process(row: Any) -> list[Any]:
    """All rows of the process in the list; on the page of one row that row."""
    return getattr(row, "of_process", None) or [row]


def _is_alive(row: Any) -> bool:
    return bool(row.alive_until > row.db_now)


def _deaths(alias: str) -> list[SafeString]:
    """The workers that died within ``SHOWN_DEATHS``, and what was released."""
    controls = QueueControl.objects.using(alias).filter(last_death_at__gt=Now() - SHOWN_DEATHS)
    return [
        format_html("{}: {} stopped without deregistering, {}", untrusted.inline(row.queue, 100),
                    untrusted.inline(row.last_death, 300), display.moment(row.last_death_at))
        for row in controls.order_by("-last_death_at")[:10]
    ]  # fmt: skip


def _progress(row: Subscriber) -> list[str]:
    found = []
    for handler in progress_in(row):
        total = "" if handler.total is None else f" of {handler.total:,.15g}"
        share = "" if handler.share is None else f" ({handler.share:.0%})"
        note = f", {handler.note}" if handler.note else ""
        found.append(
            f"{handler.consumer.rpartition('.')[2]}: {handler.done:,.15g}{total}{share}{note}, {handler.message_id}"
        )
    return found
