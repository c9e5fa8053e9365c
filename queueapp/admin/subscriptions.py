"""The subscribed consumers: whether a live worker has them, how many copies wait, and operations on them.

The code that has a consumer writes its row. Only an operator removes it, here or with ``removeconsumer``. The
operations are in the history of the queue.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.views.main import ChangeList
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.utils.html import format_html
from django.utils.safestring import SafeString

from .. import registry
from ..errors import QueueError, QueueNotFound
from ..models import Subscription
from ..operations import subscriptions
from ..operations.statistics import Database
from ..operations.subscriptions import ConsumerStats
from .databases import DatabaseFilter, OfDatabases, StrictChangeList
from .formatting import display, untrusted
from .operations import Options, ask, is_gone
from .read_only import OperatedAdmin


class MoveTo(Options):
    """The consumer that the copies move to."""

    to = forms.CharField(max_length=200, label="Consumer of the same queue")


#: Carries one operation out for one consumer: (queue, consumer, database, user, options) -> how many copies or rows.
Run = Callable[[Any, str, str, Any, dict[str, Any]], int]


def _purge(queue: Any, consumer: str, alias: str, user: Any, options: dict[str, Any]) -> int:
    return subscriptions.purge_copies(queue, consumer, by=user, using=alias)


def _move(queue: Any, consumer: str, alias: str, user: Any, options: dict[str, Any]) -> int:
    return subscriptions.move_copies(queue, consumer, options["to"], by=user, using=alias)


def _remove(queue: Any, consumer: str, alias: str, user: Any, options: dict[str, Any]) -> int:
    return subscriptions.unsubscribe(queue, consumer, by=user, using=alias)


class SubscriptionList(StrictChangeList):
    """The list, with the statistics of its consumers read once."""

    def get_results(self, request: HttpRequest) -> None:
        """Django's result, plus the statistics of the rows that it shows."""
        super().get_results(request)
        rows = list(self.result_list)
        alias = self.model_admin.database(request)
        found = _stats(alias, {row.queue for row in rows})
        for row in rows:
            row.stats = found.get((row.queue, row.consumer))
        self.result_list = rows


def _stats(alias: str, labels: set[str]) -> dict[tuple[str, str], ConsumerStats]:
    queues = [queue for queue in registry.queues if queue._meta.label in labels]
    found = Database(alias).consumers_of(queues)
    return {(stats.queue, consumer.consumer): consumer for stats in found for consumer in stats.consumers}


class SubscriptionAdmin(OperatedAdmin, OfDatabases):
    """One row per consumer and message type. ``remove`` deletes it: Django's delete page would not say what waits."""

    show_facets = admin.ShowFacets.NEVER
    list_display = ("consumer_name", "queue_name", "active", "copies", "made")
    list_display_links = None
    list_filter = (DatabaseFilter, ("queue", admin.AllValuesFieldListFilter))
    ordering = ("queue", "consumer", "type_name")
    actions = ("purge_copies", "move_copies", "remove")

    # -- permissions ----------------------------------------------------------------------------------------------

    def has_remove_permission(self, request: HttpRequest) -> bool:
        """Removing a subscription: Django's delete permission."""
        return request.user.has_perm("queueapp.delete_subscription")

    # -- pages ----------------------------------------------------------------------------------------------------

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return SubscriptionList

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest | None = None) -> bool:
        """Only what the filters offer."""
        return lookup in {DatabaseFilter.parameter_name, "queue", "queue__isnull"}

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        show, context = super().changelist_view, {"title": "Subscriptions", **(extra_context or {})}
        return self.or_note(request, self.database(request), lambda: show(request, context))

    def change_view(self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: Any = None) -> Any:
        """There is no page per row."""
        raise PermissionDenied

    def history_view(self, request: HttpRequest, object_id: str, extra_context: Any = None) -> HttpResponse:
        """The queue has the history."""
        raise PermissionDenied

    # -- columns --------------------------------------------------------------------------------------------------

    @admin.display(description="consumer, type", ordering="consumer")
    def consumer_name(self, row: Subscription) -> SafeString:
        kind = untrusted.inline(row.type_name, 200) if row.type_name else "messages without a type"
        return display.below(untrusted.inline(row.consumer, 200), kind)

    @admin.display(description="queue", ordering="queue")
    def queue_name(self, row: Subscription) -> SafeString:
        try:
            registry.queues.find(row.queue)
        except QueueNotFound:
            return display.below(untrusted.inline(row.queue, 100), display.badge("bad", "no such queue"))
        return untrusted.inline(row.queue)

    @admin.display(description="state")
    def active(self, row: Any) -> SafeString:
        active = row.stats.active if row.stats is not None else None
        if active is None:
            return display.badge("quiet", "unknown")
        return display.badge("good", "active consumer") if active else display.badge("bad", "no live worker")

    @admin.display(description="copies waiting")
    def copies(self, row: Any) -> SafeString | str:
        stats: ConsumerStats | None = row.stats
        if stats is None:
            return display.NOTHING
        oldest = "" if stats.oldest_seconds is None else f"oldest {display.of_seconds(stats.oldest_seconds)}"
        return display.below(f"{stats.waiting:,}{'' if stats.exact else '+'}", oldest if stats.waiting else "")

    @admin.display(description="since", ordering="made_at")
    def made(self, row: Subscription) -> Any:
        return display.below(
            display.moment(row.made_at), format_html("code last started {}", display.moment(row.seen_at))
        )

    # -- operations -----------------------------------------------------------------------------------------------

    @admin.action(description="Purge copies", permissions=["operate"])
    def purge_copies(self, request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponse | None:
        """Delete the copies that wait for these consumers."""
        explanation = (
            "The copies that wait for these consumers, delayed ones included, are deleted for good. Leased copies "
            "stay, and so do the subscriptions: new copies are made."
        )
        return self._do(
            request, queryset, "purge_copies", "Purge copies", ("copy", "copies", "deleted"), explanation, _purge
        )

    @admin.action(description="Move copies", permissions=["operate"])
    def move_copies(self, request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponse | None:
        """Move the copies that wait for these consumers to another one."""
        explanation = (
            "The copies that wait for these consumers, delayed ones included, are addressed to another consumer. They "
            "start anew, behind the copies that wait for it."
        )
        return self._do(
            request,
            queryset,
            "move_copies",
            "Move copies",
            ("copy", "copies", "moved"),
            explanation,
            _move,
            options=MoveTo,
        )

    @admin.action(description="Remove subscriptions", permissions=["remove"])
    def remove(self, request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponse | None:
        """Remove these consumers."""
        explanation = (
            "Processes whose code does not have these consumers make no more copies for them, for all of their types, "
            "selected or not. Waiting copies stay. A process whose code has a consumer subscribes it again when it "
            "starts."
        )
        return self._do(
            request, queryset, "remove", "Remove", ("subscription", "subscriptions", "removed"), explanation, _remove,
            question="Remove the subscriptions",
        )  # fmt: skip

    def _do(
        self,
        request: HttpRequest,
        queryset: QuerySet[Any],
        name: str,
        label: str,
        done: tuple[str, str, str],
        explanation: str,
        run: Run,
        options: type[Options] = Options,
        question: str = "",
    ) -> HttpResponse | None:
        if is_gone(self, request, queryset):
            return None
        confirmed = "confirmed" in request.POST
        form = options(request.POST) if confirmed else options()
        chosen = sorted(set(queryset.values_list("queue", "consumer")))
        if not confirmed or not form.is_valid():
            keys = [(ACTION_CHECKBOX_NAME, key) for key in queryset.values_list("pk", flat=True)]
            return ask(
                self,
                request,
                title=f"{question or label} of {len(chosen)} consumer{'' if len(chosen) == 1 else 's'}?",
                explanation=explanation,
                few=[untrusted.inline(f"{consumer} in {queue}", 300) for queue, consumer in chosen],
                hidden=[("action", name), *keys],
                form=form,
                yes=label,
                dangerous=run is not _move,
                post_to=request.get_full_path(),
                back_to=self.list_url(queryset.db),
            )
        count, level = 0, messages.SUCCESS
        for label_of_queue, consumer in chosen:
            try:
                queue = registry.queues.find(label_of_queue)
                count += run(queue, consumer, queryset.db, request.user, form.cleaned_data)
            except QueueNotFound:
                self.message_user(request, f"There is no queue {untrusted.visible(label_of_queue)}.", messages.ERROR)
                level = messages.WARNING
            except QueueError as error:
                self.message_user(request, str(error), messages.ERROR)
                level = messages.WARNING
        self.message_user(request, f"{display.counted(count, *done[:2])} {done[2]}.", level)
        return None
