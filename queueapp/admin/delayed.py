"""The delayed messages: when they are due and where they go; dispatch them now, or cancel them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.models import DELETION
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.utils.safestring import SafeString

from .. import delayed, registry
from ..errors import InvalidOption, QueueNotFound
from ..models import DelayedMessage
from ..operations import bulk_operations, selections
from ..sql import nonblocking
from .databases import DatabaseFilter
from .formatting import display, untrusted
from .large_tables.content_search import HELP
from .large_tables.lists import BoundedFilter
from .large_tables.search import keys_in_store
from .message_pages import Facts, MessageAdmin
from .operations import Operation, Options


class DestinationFilter(BoundedFilter):
    """The queues of this project; "no such queue" selects messages for other destinations, which are not delivered."""

    title = "destination"
    parameter_name = "destination"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [
            *((name, _in_words(name)) for name in selections.destinations(model_admin.database(request))),
            (selections.NO_SUCH_QUEUE, "no such queue"),
        ]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return selections.filtered(queryset, "destination", self.value())


def _in_words(destination: str) -> str:
    label, _, alias = destination.rpartition("@")
    return f"{label} in {alias}" if label else destination


class DueFilter(admin.SimpleListFilter):
    """Filters by due time. Not bounded: the index on ``due`` serves it."""

    title = "due"
    parameter_name = "when"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [("overdue", "overdue"), ("hour", "within an hour"), ("day", "within a day"), ("week", "within a week")]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return selections.filtered(queryset, "when", self.value())


class Delay(Options):
    """When the messages become due."""

    minutes = forms.FloatField(min_value=0, max_value=60 * 24 * 365, label="Minutes from now", initial=60)


_GONE = "dispatched or cancelled meanwhile"

OPERATIONS = (
    Operation(
        "dispatch_now",
        "Dispatch now",
        "made due",
        "The messages become due at once; the dispatcher moves them to their queues within about a second.",
        _GONE,
        "dispatch",
        bulk_operations.make_due,
        question="Dispatch {} now",
    ),
    Operation(
        "reschedule",
        "Reschedule",
        "rescheduled",
        "The messages become due after the given time, counted from now. An expiry moves with it.",
        _GONE,
        "dispatch",
        bulk_operations.reschedule,
        options=Delay,
    ),
    Operation(
        "delete_selected",
        "Cancel",
        "cancelled",
        "Cancelled messages are deleted for good and never reach their queues.",
        _GONE,
        "delete",
        bulk_operations.delete,
        flag=DELETION,
        dangerous=True,
        answer="Yes, cancel",
    ),
)


class DelayedAdmin(MessageAdmin):
    """All delayed messages of a database, the next due first."""

    operations = OPERATIONS
    list_order = "due"
    list_display = ("message", "due_in", "destination_queue", "body_size", "retries_so_far")
    list_display_links = ("message", "due_in")
    list_filter = (DatabaseFilter, DestinationFilter, DueFilter)
    sortable_by = ("due_in",)
    search_help_text = f"{HELP} At most 50,000 messages are read."

    def has_dispatch_permission(self, request: HttpRequest) -> bool:
        """Making a message due: Django's change permission."""
        return self._may(request, "change")

    def keys_of_id(self, rows: QuerySet[Any], term: str) -> list[int]:
        return keys_in_store(nonblocking(self.model.objects.using(rows.db)), self.list_order, term)

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        if request.method == "GET" and (note := self._custom_store_note(self.database(request))):
            self.message_user(request, note, messages.INFO)
        return super().changelist_view(request, {"title": "Delayed messages", **(extra_context or {})})

    @staticmethod
    def _custom_store_note(alias: str) -> str:
        """The note about messages in a custom store, which this list does not show; '' without such a store."""
        try:
            name = delayed.name_of_other_store(alias)
        except InvalidOption as error:
            return str(error)
        return name and (
            f"Messages sent with a delay are in the store {name}, not in this list, which has delayed retries and "
            "messages for queues of other databases. The overview counts both; delayed.cancel() and "
            "delayed.reschedule() reach both."
        )

    @admin.display(description="due", ordering="due")
    def due_in(self, row: Any) -> SafeString:
        return display.below(self._countdown(row), display.moment(row.due))

    @staticmethod
    def _countdown(row: Any) -> SafeString:
        remaining = row.due - row.db_now
        if remaining > timedelta(0):
            return display.badge("quiet", f"in {display.duration(remaining)}")
        late = display.duration(remaining)
        # A dispatcher is at most seconds late; a minute means that none is running.
        return display.badge("warn" if remaining < timedelta(minutes=-1) else "busy", f"due {late} ago")

    @admin.display(description="destination")
    def destination_queue(self, row: Any) -> Any:
        if row.destination in selections.destinations(row._state.db):
            return untrusted.inline(_in_words(row.destination))
        try:
            registry.queues.find(row.destination)
        except QueueNotFound:
            return display.below(untrusted.inline(row.destination, 100), display.badge("bad", "no such queue"))
        return untrusted.inline(row.destination)

    @admin.display(description="retries")
    def retries_so_far(self, row: Any) -> Any:
        return row.deliveries or display.NOTHING

    def title_of(self, message: Any) -> str:
        return f"Delayed message {message.message_id}"

    def queues_of_body(self, message: DelayedMessage) -> set[str]:
        return {message.destination}

    def facts(self, request: HttpRequest, message: DelayedMessage) -> Facts:
        delay = [
            ("Due", self.due_in(message)),
            ("Destination", self.destination_queue(message)),
            ("Stored", display.moment(message.stored_at)),
            ("Failed dispatches", message.retries),
        ]
        about = [("Number", message.pk), ("Id", message.message_id), ("Type", self.type_name(message, 500))]
        return [("Delay", delay), ("Message", [*about, *carried(message)])]


def carried(message: Any) -> list[tuple[str, Any]]:
    """The facts that a message keeps in every table, as far as it has them."""
    texts = (
        ("Recipient", message.recipient),
        ("Correlation id", message.correlation_id),
        ("Reply-to address", message.reply_to_address),
    )
    return [
        *((name, untrusted.inline(value, 200)) for name, value in texts if value),
        *([("Priority", message.priority)] if message.priority else []),
        ("First enqueued", display.moment(message.enqueued_at)),
        *([("Expires", display.moment(message.expires))] if message.expires else []),
        ("Deliveries", message.deliveries),
        ("Cancels", message.cancels),
    ]
