"""Search over all queues, the delayed and the poison messages at once, as far as the user may view them.

Tables are searched one after the other within the time of one search (``content_search``); the page says which were
not read, or not to their end.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse

from .. import registry
from ..models import DelayedMessage, PoisonMessage
from ..operations.safe_reads import Reader
from .formatting import untrusted
from .large_tables import search
from .large_tables.content_search import HELP, ContentSearch, Looked, needs_content, parse
from .message_pages import MessageAdmin, may_view

#: Messages of one table that are shown.
SHOWN = 20


class Place(NamedTuple):
    """What was found in one table. ``rows``: (message, URL, type, time)."""

    name: str
    rows: list[tuple[Any, ...]]
    more: str
    unread: str


def search_view(page: Any, request: HttpRequest) -> HttpResponse:
    """The page of a search, with or without a query."""
    if not page.has_view_permission(request):
        raise PermissionDenied
    query = request.GET.get("q", "")[:500]
    terms = parse(query)
    places = list(_search(page, request, terms)) if terms else []
    context = {
        **page.admin_site.each_context(request),
        "title": "Search",
        "opts": page.opts,
        "media": page.media,
        "query": query,
        "help": HELP,
        "found": [place for place in places if place.rows],
        "unread": [place for place in places if place.unread],
        "searched": len(places),
    }
    request.current_app = page.admin_site.name  # type: ignore[attr-defined]
    return TemplateResponse(request, "admin/queueapp/search.html", context)


def _search(page: Any, request: HttpRequest, terms: Any) -> Iterator[Place]:
    looking = ContentSearch(terms, partial(may_view, page.admin_site, request))
    by_content = needs_content(terms)
    readers: dict[str, Reader] = {}
    for model, alias in _tables(page, request):
        messages: MessageAdmin = page.admin_site._registry[model]
        name = model._meta.label if model in registry.queues else str(model._meta.verbose_name_plural)
        if alias != messages.databases()[0]:
            name = f"{name} in {alias}"
        if looking.is_over:
            yield Place(name, [], "", "not searched: the time was over")
            continue
        reader = readers.setdefault(alias, Reader(alias))
        found, cause = reader.read(partial(_look, messages, request, alias, looking if by_content else None, terms[0]))
        if found is None:
            yield Place(name, [], "", f"not searched: {untrusted.visible(cause)[:200]}")
            continue
        looked, shown = found
        more = f"and {len(looked.keys) - SHOWN} more" if len(looked.keys) > SHOWN else ""
        yield Place(name, shown, more, str(looked))


def _look(
    messages: MessageAdmin, request: HttpRequest, alias: str, looking: ContentSearch | None, term: Any
) -> tuple[Looked, list[tuple[Any, ...]]]:
    """What is in one table, by content or by the number or id, and the rows that are shown."""
    rows = messages.get_queryset(request).using(alias)
    if looking is not None:
        looked = looking.look(rows, messages.list_order.startswith("-"))
    else:
        looked = Looked(_keys(messages, rows, term))
    shown = [
        (row, messages.url_of(row), messages.message_type(row), _time(row))
        for row in rows.filter(pk__in=looked.keys[:SHOWN])
    ]
    return looked, shown


def _tables(page: Any, request: HttpRequest) -> Iterator[tuple[Any, str]]:
    """The tables that the user may view: the poison and delayed messages, then the queues."""
    for model in (PoisonMessage, DelayedMessage, *sorted(registry.queues, key=lambda queue: queue._meta.label)):
        messages = page.admin_site._registry.get(model)
        if isinstance(messages, MessageAdmin) and messages.has_view_permission(request):
            for alias in messages.databases():
                yield model, alias


def _keys(messages: MessageAdmin, rows: Any, term: Any) -> list[int]:
    """Keys of the messages with this number, or whose id begins with it."""
    keys = list(rows.filter(pk=int(term.value)).values_list("pk", flat=True)) if _is_number(term.value) else []
    return keys + (messages.keys_of_id(rows, term.value) if len(term.value) >= 4 else [])[: search.MAX_MATCHES]


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 19


def _time(row: Any) -> Any:
    return getattr(row, "failed_at", None) or getattr(row, "due", None) or getattr(row, "enqueued_at", None)
