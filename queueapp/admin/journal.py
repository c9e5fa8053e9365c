"""The journal: publications of journaled topics, and replaying them into a queue. Retention deletes the entries."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any

from django import forms
from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.urls import path, reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString

from .. import registry
from ..errors import QueueError
from ..models import JournalEntry, Now
from ..operations import bulk_operations, journal
from ..sql import nonblocking
from .databases import DatabaseFilter
from .features import in_use
from .formatting import display, untrusted
from .large_tables.lists import BoundedFilter
from .large_tables.search import keys_in_store
from .message_pages import Facts, MessageAdmin
from .operations import Options, Rate, ask, log_entry, to_operation

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


def _queues() -> list[tuple[str, str]]:
    return [(label, label) for label in sorted(str(queue._meta.label) for queue in registry.queues)]


class ReplayOptions(Options, Rate):
    """What is replayed, and into which queue."""

    field_order = ("topic", "since", "filter", "to", "rate")
    topic = forms.CharField(
        max_length=255, help_text="A topic, or a regular expression that is searched in their names."
    )
    since = forms.CharField(
        max_length=64, initial="epoch",
        help_text="epoch, a bookmark (it begins after that), or a time such as 2026-11-22T10:00 (UTC).",
    )  # fmt: skip
    filter = forms.CharField(max_length=2000, required=False, help_text="An expression, such as /total > 100.")
    to = forms.ChoiceField(choices=_queues, label="Into the queue")

    def clean(self) -> dict[str, Any]:
        """Raises nothing: what the replay would refuse is an error of the form."""
        given: dict[str, Any] = super().clean() or {}
        if not self.errors:
            try:
                self.preview = journal.preview(given)
            except QueueError as error:
                self.add_error(None, str(error))
        return given


class JournalAdmin(MessageAdmin):
    """The journal of a database, newest first."""

    list_order = "-seq"
    rows_are = "publication"
    list_display = ("published", "message", "topic_name", "taken_by", "body_size")
    list_display_links = ("published", "message")
    list_filter = (DatabaseFilter, TopicFilter, PublishedFilter)
    change_list_template = "admin/queueapp/journal.html"
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
        context = {"title": "Journal", "replay_url": self._replay_url() if self.has_replay_permission(request) else ""}
        return super().changelist_view(request, {**context, **(extra_context or {})})

    # -- replaying ------------------------------------------------------------------------------------------------

    def has_replay_permission(self, request: HttpRequest) -> bool:
        """``queueapp.replay_journalentry``, with the permission to view the journal."""
        return self.has_view_permission(request) and self._may(request, "replay")

    def _replay_url(self) -> str:
        return reverse(f"{self.admin_site.name}:{self.opts.app_label}_{self.opts.model_name}_replay")

    def get_urls(self) -> list[Any]:
        name = f"{self.opts.app_label}_{self.opts.model_name}_replay"
        return [path("replay/", self.admin_site.admin_view(self.replay_view), name=name), *super().get_urls()]

    def replay_view(self, request: HttpRequest) -> HttpResponse:
        """Ask what to replay, show how many messages that is, and start it as an operation."""
        if not self.has_replay_permission(request):
            raise PermissionDenied
        form = ReplayOptions(request.POST) if request.method == "POST" else ReplayOptions(initial=request.GET.dict())
        about: dict[str, Any] = {"few": [], "post_to": self._replay_url(), "back_to": self.list_url()}
        if not form.is_bound or not form.is_valid() or "change" in request.POST:
            explanation = (
                "Publications that the journal still has are inserted into a queue again, as copies, in their order. "
                "Nothing is done before you have seen how many they are."
            )
            return ask(self, request, title="Replay the journal", explanation=explanation, form=form, hidden=[],
                       yes="Count them", **about)  # fmt: skip
        given, preview = form.cleaned_data, form.preview
        if request.POST.get("counted") != "yes":
            count = display.messages(preview.count) if preview.complete else f"at least {preview.count:,} messages"
            first = f" The first one was published {preview.first[1]:%Y-%m-%d %H:%M:%S} UTC." if preview.first else ""
            hidden = [*((name, value) for name, value in given.items() if value is not None), ("counted", "yes")]
            return ask(
                self, request, title=f"Replay {count} into {given['to']}?", form=Options(), hidden=hidden,
                explanation=f"They are inserted in the background, also if the queue has had them before.{first}",
                yes="Replay", **about,
            )  # fmt: skip
        rate = given.pop("rate")
        started = bulk_operations.start_replay(given, rate=rate, by=request.user)
        text = ", ".join(f"{name}: {value}" for name, value in given.items() if value)
        log_entry(self, request, f"Replay, {untrusted.visible(text)[:3000]}: {started}", about=str(started)).save()
        return to_operation(self, request, started)

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
