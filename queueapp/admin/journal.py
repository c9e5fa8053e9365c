"""The journal: publications of journaled topics. Read-only; retention deletes them."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.utils.html import format_html
from django.utils.safestring import SafeString

from ..models import JournalEntry, Now
from ..sql import nonblocking
from .databases import DatabaseFilter
from .features import in_use
from .formatting import display, untrusted
from .large_tables.lists import BoundedFilter
from .large_tables.search import keys_in_store
from .message_pages import Facts, MessageAdmin

#: The filter offers the topics of so many of the newest entries, at most so many of them.
SAMPLE, CHOICES = 1000, 20


class TopicFilter(BoundedFilter):
    """The topics that occur among the newest entries."""

    title = "topic"
    parameter_name = "topic"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        rows = nonblocking(JournalEntry.objects.using(model_admin.database(request))).order_by("-seq")
        topics = [topic for topic, _ in Counter(rows.values_list("topic", flat=True)[:SAMPLE]).most_common(CHOICES)]
        chosen = request.GET.get(str(self.parameter_name))
        if chosen and chosen not in topics:
            topics.append(chosen)
        return [(topic, untrusted.visible(topic)[:80]) for topic in topics]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return queryset.filter(topic=self.value()) if self.value() else queryset


class PublishedFilter(BoundedFilter):
    """Filters by the time of publication, which no index serves."""

    title = "published"
    parameter_name = "published"
    _within = {"hour": timedelta(hours=1), "day": timedelta(days=1), "week": timedelta(weeks=1)}

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [("hour", "within an hour"), ("day", "within a day"), ("week", "within a week")]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        within = self._within.get(str(self.value()))
        return queryset.filter(published_at__gte=Now() - within) if within is not None else queryset


class JournalAdmin(MessageAdmin):
    """The journal of a database, newest first."""

    list_order = "-seq"
    rows_are = "publication"
    list_display = ("published", "message", "topic_name", "taken_by", "body_size")
    list_display_links = ("published", "message")
    list_filter = (DatabaseFilter, TopicFilter, PublishedFilter)
    sortable_by = ("published",)
    actions = None

    def has_module_permission(self, request: HttpRequest) -> bool:
        return in_use(JournalEntry) and super().has_module_permission(request)

    search_help_text = "A bookmark, or a message id or its beginning (among the newest 100,000)."

    # -- permissions ----------------------------------------------------------------------------------------------

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Never: retention deletes entries."""
        return False

    def delete_view(self, request: HttpRequest, object_id: str, extra_context: Any = None) -> Any:
        raise PermissionDenied

    def history_view(self, request: HttpRequest, object_id: str, extra_context: Any = None) -> Any:
        """There are no operations on entries."""
        raise PermissionDenied

    def queues_of_body(self, message: JournalEntry) -> set[str]:
        """The queues that it was published to, whether their filters accepted it or not. Without a queue, the
        permission to view the journal is enough."""
        return {name.lstrip("+-") for name in message.queues.split("|") if name}

    # -- the list -------------------------------------------------------------------------------------------------

    def keys_of_id(self, rows: QuerySet[Any], term: str) -> list[int]:
        # The message id has no index here, so a whole id is searched like a prefix, in a window.
        return keys_in_store(nonblocking(self.model.objects.using(rows.db)), self.list_order, term[:31])

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        return super().changelist_view(request, {"title": "Journal", **(extra_context or {})})

    @admin.display(description="published", ordering="seq")
    def published(self, row: Any) -> SafeString:
        return display.below(display.ago(row.published_at, row.db_now), f"bookmark {row.pk}")

    @admin.display(description="topic")
    def topic_name(self, row: Any) -> Any:
        return untrusted.inline(row.topic, 60)

    @admin.display(description="queues")
    def taken_by(self, row: Any) -> Any:
        names = [name for name in row.queues.split("|") if name]
        if not names:
            return display.NOTHING
        return display.below(*map(self._taken, names[:3]), "…" if len(names) > 3 else "")

    def _taken(self, name: str) -> SafeString:
        words = {"+": " (when the queue has capacity)", "-": " (refused by its filter)"}.get(name[0], "")
        return format_html("{}{}", untrusted.inline(name.lstrip("+-"), 60), words)

    # -- one message ----------------------------------------------------------------------------------------------

    def title_of(self, message: Any) -> str:
        return f"Journal entry {message.pk}"

    def facts(self, request: HttpRequest, message: JournalEntry) -> Facts:
        texts = (("Correlation id", message.correlation_id), ("Reply-to address", message.reply_to_address))
        return [
            (
                "Publication",
                [
                    ("Topic", untrusted.inline(message.topic, 255)),
                    ("Published", display.moment(message.published_at)),
                    ("Bookmark", message.pk),
                    ("Queues", self.taken_by(message)),
                ],
            ),
            (
                "Message",
                [
                    ("Id", message.message_id),
                    ("Type", self.type_name(message, 500)),
                    *((name, untrusted.inline(value, 200)) for name, value in texts if value),
                    *([("Expires", display.moment(message.expires))] if message.expires else []),
                ],
            ),
        ]
