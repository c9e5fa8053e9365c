"""Read-only admin page of Celery results. All texts are untrusted."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

from ....admin.databases import DatabaseFilter
from ....admin.formatting import display, untrusted
from ....admin.large_tables.lists import BoundedFilter
from ....admin.message_pages import may_view
from ....admin.read_only import ResultsAdmin
from ....models import Now, UtcField
from ....sql import nonblocking
from ..models import MAX_ID_LENGTH, BrokerQueue, CeleryResult

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
    shown = untrusted.body(whole[: untrusted.SHOWN], len(whole))
    cut = "" if shown.complete else "\n(truncated)"
    return format_html('<pre class="queueapp-text">{}{}</pre>', shown.text, cut)
