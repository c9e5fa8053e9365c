"""The messages of one queue: the page of every queue whose app does not register one of its own.

>>> @admin.register(Orders)
... class OrdersAdmin(QueueAdmin):
...     list_per_page = 20
"""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import admin
from django.contrib.admin.models import DELETION
from django.db import router
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.utils.html import format_html
from django.utils.safestring import SafeString

from ..models import Subscriber
from ..models.delivery import Semantics
from ..operations import bulk_operations, selections
from ..operations.selections import LeaseState
from ..sql import nonblocking
from ..sql.claims import LAST_END
from .formatting import display, untrusted
from .large_tables.content_search import HELP
from .large_tables.lists import BoundedFilter
from .large_tables.search import keys_in_queue
from .message_pages import Facts, MessageAdmin
from .operations import Operation, Options

_TONES: dict[LeaseState, display.Tone] = {
    LeaseState.READY: "good",
    LeaseState.LEASED: "busy",
    LeaseState.LEASE_EXPIRED: "warn",
    LeaseState.EXPIRED: "bad",
    LeaseState.PENDING_EVALUATION: "warn",
}


class StateFilter(BoundedFilter):
    """Ready, leased, lease expired, expired or pending evaluation."""

    title = "state"
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        queue = model_admin.model
        alias = model_admin.get_queryset(request).db
        return [(state.value, state.label) for state in LeaseState if state.condition(queue, alias) is not None]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return selections.filtered(queryset, "state", self.value())


class DeliveredFilter(BoundedFilter):
    """Filters by earlier deliveries and cancels."""

    title = "delivered before"
    parameter_name = "delivered"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [("no", "never"), ("yes", "at least once"), ("cancelled", "cancelled")]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return selections.filtered(queryset, "delivered", self.value())


class AgeFilter(BoundedFilter):
    """Filters by the time that a message waits."""

    title = "waiting for"
    parameter_name = "age"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(name, f"more than {'an' if name == 'hour' else 'a'} {name}") for name in selections.OLDER_THAN]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return selections.filtered(queryset, "age", self.value())


class PriorityFilter(admin.SimpleListFilter):
    """Filters by priority. Not bounded: a queue with levels has an index on (priority, seq)."""

    title = "priority"
    parameter_name = "priority"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(str(level), str(level)) for level in reversed(range(model_admin.model.delivery.priorities))]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return selections.filtered(queryset, "priority", self.value())


class PriorityOfRecipientsFilter(BoundedFilter, PriorityFilter):
    """Bounded, because with recipients the index begins with them."""


# -- operations on a waiting message -------------------------------------------------------------------------------


class Priority(Options):
    """The new priority."""

    priority = forms.IntegerField(min_value=0, help_text="A level of the queue: 0 is the lowest.")


_IN_FLIGHT = "leased, locked by a receiver, or gone"

OPERATIONS = (
    Operation(
        "release_lease",
        "Release lease",
        "released",
        "The lease ends now, and the next receiver gets the message. If the holder is still working, the message is "
        "handled twice.",
        "not leased, or gone",
        "change_messages",
        bulk_operations.release_leases,
        question="Release the lease of {}",
        offered=lambda message: getattr(message, "lease_token", None) is not None,
    ),
    Operation(
        "stop_handler",
        "Stop its handler",
        "asked to stop",
        "A running handler is asked to stop within a second: an async handler is cancelled, a sync handler is "
        "interrupted after CANCEL_GRACE. Its message becomes poison, and no attempt is counted. A message that is not "
        "being handled stays as it is.",
        "gone, or without a live worker",
        "change_messages",
        bulk_operations.stop_handlers,
        question="Stop the handler of {}",
        # A message in a TRANSACTIONAL handler looks like a waiting one.
        offered=lambda message: (
            getattr(message, "lease_token", None) is not None or message.delivery.semantics is Semantics.TRANSACTIONAL
        ),
    ),
    Operation(
        "set_priority",
        "Change priority",
        "given the priority",
        "Messages of a higher priority are received first. Leased messages are skipped.",
        "leased, locked by a receiver, gone, or of this priority already",
        "change_messages",
        bulk_operations.set_priority,
        options=Priority,
        question="Change the priority of {}",
        offered=lambda message: message.delivery.priorities > 1,
    ),
    Operation(
        "move_to_poison",
        "Move to poison",
        "moved to poison",
        "The messages leave the queue and are kept, whole, among the poison messages, where they can be requeued.",
        _IN_FLIGHT,
        "change_messages",
        bulk_operations.move_to_poison,
        flag=DELETION,
        question="Move {} to poison",
    ),
    Operation(
        "delete_selected",
        "Delete",
        "deleted",
        "The messages are deleted for good and will not be handled. Leased messages are skipped.",
        _IN_FLIGHT,
        "delete",
        bulk_operations.delete,
        flag=DELETION,
        dangerous=True,
    ),
)


class QueueAdmin(MessageAdmin):
    """The messages of one queue."""

    operations = OPERATIONS
    id_field = "id"
    list_order = "seq"
    sortable_by = ("seq",)
    list_display_links = ("message", "seq")
    search_help_text = f"{HELP} At most 50,000 messages are read."

    def _has(self, name: str) -> bool:
        return any(field.name == name for field in self.opts.local_concrete_fields)

    def databases(self) -> list[str]:
        """The database of the queue."""
        return [router.db_for_write(self.model)]

    # -- permissions ----------------------------------------------------------------------------------------------

    def has_change_messages_permission(self, request: HttpRequest) -> bool:
        """Releasing leases and moving to poison: Django's change permission on the queue."""
        return self._may(request, "change")

    # -- the list -------------------------------------------------------------------------------------------------

    def get_list_display(self, request: HttpRequest) -> tuple[Any, ...]:
        delivery = self.model.delivery
        columns = {
            "message": True,
            "seq": True,
            "state": True,
            "level": bool(delivery.priorities > 1 or delivery.priority) and self._has("priority"),
            "age": self._has("enqueued_at"),
            "body_size": True,
            "delivery_count": self._has("deliveries"),
        }
        return tuple(name for name, shown in columns.items() if shown)

    def get_actions(self, request: HttpRequest) -> Any:
        """The priority can be changed where the queue has several."""
        actions = super().get_actions(request)
        if self.model.delivery.priorities <= 1 or not self._has("priority"):
            actions.pop("set_priority", None)
        return actions

    def get_list_filter(self, request: HttpRequest) -> tuple[Any, ...]:
        filters: list[Any] = [StateFilter]
        if self._has("deliveries") and self._has("cancels"):
            filters.append(DeliveredFilter)
        if self._has("enqueued_at"):
            filters.append(AgeFilter)
        if self.model.delivery.priorities > 1 and self._has("priority"):
            filters.append(PriorityOfRecipientsFilter if self.model.delivery.recipients else PriorityFilter)
        return tuple(filters)

    def keys_of_id(self, rows: QuerySet[Any], term: str) -> list[int]:
        return keys_in_queue(nonblocking(self.model._base_manager.using(rows.db)), term)

    def prepare_rows(self, rows: list[Any]) -> None:
        """Fetch the holders of all leases on the page with one query."""
        alias = self.databases()[0]
        owners = {row.lease_owner for row in rows if getattr(row, "lease_owner", None)}
        known = Subscriber.objects.using(alias).in_bulk(owners) if owners else {}
        for row in rows:
            row.holder = known.get(getattr(row, "lease_owner", None))

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        return super().changelist_view(request, {"title": f"Messages in {self.opts.label}", **(extra_context or {})})

    def named(self, alias: str) -> str:
        return f"Queue {self.opts.label}"

    # -- columns --------------------------------------------------------------------------------------------------

    def besides(self, row: Any) -> list[Any]:
        recipient = getattr(row, "recipient", "")
        return [format_html("for {}", untrusted.inline(recipient, 40))] if recipient else []

    # Not the model's fields: the list could be sorted by a field, and no index gives that order.
    @admin.display(description="priority")
    def level(self, row: Any) -> int:
        return int(row.priority)

    @admin.display(description="deliveries")
    def delivery_count(self, row: Any) -> Any:
        cancels = getattr(row, "cancels", 0)
        return display.below(row.deliveries, f"{cancels} cancel{'' if cancels == 1 else 's'}" if cancels else "")

    @admin.display(description="enqueued")
    def age(self, row: Any) -> Any:
        return display.ago(row.enqueued_at, row.db_now)

    @admin.display(description="state")
    def state(self, row: Any) -> SafeString:
        state = LeaseState.of(row, row.db_now)
        until: Any = getattr(row, "lease_expires", None)
        if state is LeaseState.LEASED:
            remaining = "unlimited" if until > LAST_END else f"{display.duration(until - row.db_now)} left"
            text = f"{self.holder_name(row)}, {remaining}"
        elif state is LeaseState.LEASE_EXPIRED:
            text = f"{self.holder_name(row)}, {display.duration(row.db_now - until)} ago"
        else:
            return display.badge(_TONES[state], state.label)
        # The title has the time that "left" and "ago" refer to.
        tag = display.badge(_TONES[state], state.label, f"lease until {until.isoformat()}")
        return display.below(tag, untrusted.breakable(text))

    def holder_name(self, row: Any) -> str:
        """host:process of the holder of the lease. A script that called receive() is no subscriber and has only a
        token."""
        holder = getattr(row, "holder", None)
        return f"{untrusted.visible(holder.host)[:60]}:{holder.process}" if holder else "a script or a past worker"

    # -- one message ----------------------------------------------------------------------------------------------

    def title_of(self, message: Any) -> str:
        return f"Message {message.pk} in {self.opts.label}"

    def facts(self, request: HttpRequest, message: Any) -> Facts:
        self.prepare_rows([message])
        texts = {"recipient": "Recipient", "correlation_id": "Correlation id", "reply_to_address": "Reply-to address"}
        about: list[tuple[str, Any]] = [
            ("Seq", message.pk),
            ("Id", message.id),
            ("Type", self.type_name(message, 500)),
        ]
        for name, title in texts.items():
            if value := getattr(message, name, None):
                about.append((title, untrusted.inline(value, 200)))
        if getattr(message, "priority", 0):
            about.append(("Priority", message.priority))
        about += [
            (name, display.moment(getattr(message, field)))
            for name, field in (("Enqueued", "enqueued_at"), ("Expires", "expires"))
            if self._has(field)
        ]
        lease: list[tuple[str, Any]] = [("State", self.state(message))]
        if self._has("deliveries") and self._has("cancels"):
            lease += [("Deliveries", message.deliveries), ("Cancels", message.cancels)]
        if getattr(message, "lease_token", None):
            lease += [
                ("Holder", untrusted.inline(self.holder_name(message))),
                ("Owner", message.lease_owner),
                ("Token", message.lease_token),
                ("Lease expires", display.moment(message.lease_expires)),
            ]
        return [("Message", about), ("Lease", lease)]
