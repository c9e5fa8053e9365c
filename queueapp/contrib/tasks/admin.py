"""Read-only admin page of task results. All texts are untrusted.

Ready tasks are on the page of their queue; failed ones are requeued from the poison page.
"""

from __future__ import annotations

import json
import uuid
from typing import Any

from django.contrib import admin
from django.db import router
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

from ...admin.databases import DatabaseFilter
from ...admin.formatting import display, untrusted
from ...admin.large_tables.lists import BoundedFilter
from ...admin.message_pages import may_view
from ...admin.read_only import ResultsAdmin
from ...models import Now, UtcField
from ...sql import nonblocking
from . import results
from .consumers import backends, queue_of
from .models import Result, TaskQueue
from .serialization import id_of

#: Badge colour of each status.
_TONES: dict[str, display.Tone] = {"READY": "quiet", "RUNNING": "busy", "SUCCESSFUL": "good", "FAILED": "bad"}
NOT_ALLOWED = "You may not view the bodies of this queue."
_LARGE = ("headers", "body", "return_value", "errors")


class StatusFilter(BoundedFilter):
    """Filters by the stored status. A task that was requeued since then is listed by it, and shown with its current
    status."""

    title = "status"
    parameter_name = "status"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(status.value, status.value.lower()) for status in Result.Status]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return queryset if self.value() is None else queryset.filter(status=self.value())


class QueueNameFilter(BoundedFilter):
    """Filters by the queue names of these settings."""

    title = "queue name"
    parameter_name = "queue_name"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(name, name) for name in sorted({name for backend in backends() for name in backend.queues})]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return queryset if self.value() is None else queryset.filter(queue_name=self.value())


@admin.register(Result)
class ResultAdmin(ResultsAdmin):
    """The results of tasks, the newest first."""

    title = "Task results"
    list_order = "-id"
    list_display = ("status_now", "task_path", "queue", "enqueued", "finished", "attempts")
    list_display_links = ("status_now",)
    list_filter = (DatabaseFilter, StatusFilter, QueueNameFilter)
    ordering = ("-id",)
    search_help_text = "The id of a result."
    readonly_fields = (
        "id", "status_now", "task_path", "queue", "enqueued", "started", "last_attempted", "finished", "attempts",
        "arguments", "returned", "raised", "workers",
    )  # fmt: skip
    fields = readonly_fields

    # -- the list ------------------------------------------------------------------------------------------------------

    def databases(self) -> list[str]:
        """The databases that have tasks."""
        first = router.db_for_write(Result)
        return [first, *sorted({router.db_for_write(queue) for queue in _queues()} - {first})]

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        rows = nonblocking(super().get_queryset(request))
        return rows.defer(*_LARGE).annotate(db_now=Now(output_field=UtcField()))

    def prepare_rows(self, rows: list[Any]) -> None:
        """Add the current status to each row, with one statement per queue."""
        if rows:
            now = results.statuses(_queues(), rows[0]._state.db, rows)
            for row in rows:
                row.now = now[row.pk].value

    def is_key(self, value: str) -> bool:
        return id_of(value) is not None

    def get_search_results(self, request: HttpRequest, queryset: QuerySet[Any], search_term: str) -> tuple[Any, bool]:
        term = search_term.strip()
        if not term:
            return queryset, False
        identity = id_of(term)
        return (queryset.filter(pk=identity) if identity is not None else queryset.none()), False

    # -- the detail page -----------------------------------------------------------------------------------------------

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Any:
        alias, primary = self.place_of(object_id)
        try:
            row = self.get_queryset(request).using(alias).filter(pk=uuid.UUID(primary)).first()
        except ValueError:
            return None
        if row is not None:
            self.prepare_rows([row])
            row.shows_values = may_view(self.admin_site, request, _queue_of_row(row)._meta.label)
        return row

    # -- columns and fields --------------------------------------------------------------------------------------------

    @admin.display(description="status")
    def status_now(self, row: Any) -> SafeString:
        since = f"was {row.status.lower()}" if row.now != row.status else ""
        return display.below(display.badge(_TONES[row.now], row.now.lower()), since)

    @admin.display(description="task")
    def task_path(self, row: Result) -> SafeString:
        return display.below(untrusted.inline(row.task, 120), display.short_id(row.pk))

    @admin.display(description="queue name")
    def queue(self, row: Result) -> SafeString:
        return display.below(untrusted.inline(row.queue_name), format_html("backend {}", untrusted.inline(row.backend)))

    @admin.display(description="enqueued")
    def enqueued(self, row: Any) -> Any:
        return display.ago(row.enqueued_at, row.db_now)

    @admin.display(description="started")
    def started(self, row: Any) -> Any:
        return display.ago(row.started_at, row.db_now)

    @admin.display(description="last attempted")
    def last_attempted(self, row: Any) -> Any:
        return display.ago(row.last_attempted_at, row.db_now)

    @admin.display(description="finished")
    def finished(self, row: Any) -> Any:
        return display.ago(row.finished_at, row.db_now)

    @admin.display(description="attempts")
    def attempts(self, row: Result) -> int:
        return len(_list(row.worker_ids))

    @admin.display(description="arguments")
    def arguments(self, row: Any) -> Any:
        if not row.shows_values:
            return NOT_ALLOWED
        shown = untrusted.body(bytes(row.body) if row.body is not None else None, len(row.body or b""))
        return untrusted.block(shown)

    @admin.display(description="return value")
    def returned(self, row: Any) -> Any:
        if not row.shows_values:
            return NOT_ALLOWED
        return (
            untrusted.block(untrusted.text(row.return_value))
            if row.status == Result.Status.SUCCESSFUL
            else display.NOTHING
        )

    @admin.display(description="errors")
    def raised(self, row: Result) -> Any:
        blocks = [(untrusted.block(untrusted.text(f"{path}\n{text}")),) for path, text in _list(row.errors)]
        return format_html_join("", "{}", blocks) if blocks else display.NOTHING

    @admin.display(description="workers")
    def workers(self, row: Result) -> Any:
        return untrusted.inline(", ".join(map(str, _list(row.worker_ids))), 500)


def _list(text: str) -> list[Any]:
    found = json.loads(text)
    return found if isinstance(found, list) else []


def _queue_of_row(row: Result) -> Any:
    """The queue whose permission guards the values of a result; of an unknown backend the default queue."""
    found = (queue_of(backend) for backend in backends() if backend.alias == row.backend)
    return next((queue for queue in found if queue is not None), TaskQueue)


def _queues() -> list[Any]:
    found = (queue_of(backend) for backend in backends())
    return list(dict.fromkeys(queue for queue in found if queue is not None))
