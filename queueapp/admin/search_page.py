"""Search over all queues, the delayed and the poison messages at once, as far as the user may view them.

By a number or an id the tables are searched one after the other within ``content_search.MAX_SECONDS``. By what is in a
message each response looks at a part (``large_tables.sliced_search``); its link "Search on" leads to the next, and a
script follows it. The page says which tables were not read, or not to their end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from time import monotonic
from typing import Any, NamedTuple

from django.core.exceptions import PermissionDenied
from django.db import connections
from django.http import HttpRequest, HttpResponse
from django.utils.http import urlencode

from .. import registry
from ..models import DelayedMessage, PoisonMessage
from ..operations.safe_reads import Reader
from ..sql.orm import rows_in
from .formatting import untrusted
from .large_tables import content_search, search
from .large_tables.content_search import HELP, ContentSearch, closed_bodies, needs_content, parse
from .large_tables.sliced_search import FIRST_SIZE, MAX_SIZE, Position, Rows, SlicedSearch
from .message_pages import MessageAdmin, may_view
from .operations import render_page

#: Messages of one table that are shown.
SHOWN = 20

#: Above the result for a number: an order number is looked for far more often than the number of a row.
_ONLY_NUMBERS = "A number finds the rows of this number. To search in bodies name the field, for example order={}."


class Place(NamedTuple):
    """What was found in one table. ``rows``: (message, URL, type, time)."""

    name: str
    rows: list[tuple[Any, ...]]
    more: str = ""
    unread: str = ""


class Found(NamedTuple):
    """What one response shows. ``searched``: how many tables it is about; ``progress``: how far the search has come;
    ``further``: the address of the next part, '' at the end."""

    places: list[Place]
    searched: int
    progress: str = ""
    further: str = ""


def search_view(page: Any, request: HttpRequest) -> HttpResponse:
    """The page of a search, with or without a query."""
    if not page.has_view_permission(request):
        raise PermissionDenied
    query = request.GET.get("q", "")[:500]
    terms = parse(query)
    if not terms:
        found = Found([], 0)
    elif needs_content(terms):
        found = _search_content(page, request, query, terms)
    else:
        places = list(_search_ids(page, request, terms[0]))
        found = Found(places, len(places), _ONLY_NUMBERS.format(query.strip()) if terms[0].kind == "text" else "")
    context = {
        "query": query,
        "help": HELP,
        "found": [place for place in found.places if place.rows],
        "unread": [place for place in found.places if place.unread],
        "searched": found.searched,
        "progress": found.progress,
        "further": found.further,
    }
    return render_page(page, request, "admin/queueapp/search.html", "Search", context)


# -- by what is in a message -----------------------------------------------------------------------------------------


def _search_content(page: Any, request: HttpRequest, query: str, terms: Any) -> Found:
    tables = list(_tables(page, request))
    aliases = list(dict.fromkeys(alias for _, alias in tables))
    tables.sort(key=lambda table: aliases.index(table[1]))
    names = [_name(page.admin_site._registry[model], model, alias) for model, alias in tables]
    rows = []
    for model, alias in tables:
        messages: MessageAdmin = page.admin_site._registry[model]
        of_table, shown = partial(_rows, messages, request, alias), partial(_shown, messages, request, alias)
        rows.append(Rows(model, alias, of_table, messages.list_order.startswith("-"), shown))
    looking = SlicedSearch(
        ContentSearch(terms, partial(may_view, page.admin_site, request)), rows, _position(request, names)
    )
    looking.run()
    places = []
    for part in looking.parts:
        more = f"More than {len(part.rows)} match" if part.more else ""
        unread = [f"not searched to its end: {untrusted.visible(part.cause)[:200]}"] if part.cause else []
        unread += [closed_bodies(part.closed)] if part.closed else []
        places.append(Place(names[part.table], part.rows, more, "; ".join(unread)))
    at = looking.position
    progress = f"{at.table:,} of {len(tables):,} tables, {at.rows:,} messages looked at."
    further = "" if looking.is_over else f"?{urlencode({'q': query, **_parameters(at, names)})}"
    return Found(places, len(tables), progress, further)


def _parameters(position: Position, names: Sequence[str]) -> dict[str, Any]:
    """A position in an address. The table is named: their numbers change with the queues of the project."""
    known = {"at": names[position.table], "after": position.after, "size": position.size}
    known |= {"rows": position.rows, "closed": position.closed}
    return {name: value for name, value in known.items() if value is not None}


def _position(request: HttpRequest, names: Sequence[str]) -> Position:
    """The position in the address of a request; the beginning, if there is none or it is not valid."""
    name, numbers = request.GET.get("at", ""), {}
    for parameter in ("after", "size", "rows", "closed"):
        text = request.GET.get(parameter, "")
        if _is_number(text.removeprefix("-")):
            numbers[parameter] = int(text)
    if name not in names:
        return Position()
    size = min(MAX_SIZE, max(1, numbers.get("size", FIRST_SIZE)))
    counts = {parameter: max(0, numbers.get(parameter, 0)) for parameter in ("rows", "closed")}
    return Position(names.index(name), numbers.get("after"), size, **counts)


# -- by a number or an id --------------------------------------------------------------------------------------------


def _search_ids(page: Any, request: HttpRequest, term: Any) -> Iterator[Place]:
    tables, ends_at = list(_tables(page, request)), monotonic() + content_search.MAX_SECONDS
    # One reader of each database: after a connection error it does not try again.
    readers = {alias: Reader(alias) for alias in {alias for _, alias in tables}}
    empty = _empty(tables, readers)
    for model, alias in tables:
        messages: MessageAdmin = page.admin_site._registry[model]
        name = _name(messages, model, alias)
        if (model, alias) in empty:
            yield Place(name, [])
            continue
        if monotonic() > ends_at:
            yield Place(name, [], "", "not searched: the time was over")
            continue
        found, cause = readers[alias].read(partial(_find, messages, request, alias, term))
        if found is None:
            yield Place(name, [], "", f"not searched: {untrusted.visible(cause)[:200]}")
            continue
        keys, shown = found
        yield Place(name, shown, f"And {len(keys) - SHOWN} more" if len(keys) > SHOWN else "")


def _find(messages: MessageAdmin, request: HttpRequest, alias: str, term: Any) -> tuple[list[int], list[Any]]:
    """The keys of the messages of one table with this number or id, and the rows that are shown."""
    keys = _keys(messages, _rows(messages, request, alias), term)
    return keys, _shown(messages, request, alias, keys[:SHOWN])


# -- both ------------------------------------------------------------------------------------------------------------


def _name(messages: MessageAdmin, model: Any, alias: str) -> str:
    name = model._meta.label if model in registry.queues else str(model._meta.verbose_name_plural)
    return name if alias == messages.databases()[0] else f"{name} in {alias}"


def _shown(messages: MessageAdmin, request: HttpRequest, alias: str, keys: Sequence[int]) -> list[tuple[Any, ...]]:
    """The rows that a table of the page shows of these messages."""
    rows = _rows(messages, request, alias).filter(pk__in=keys)
    return [(row, messages.url_of(row), messages.message_type(row), _time(row)) for row in rows]


def _rows(messages: MessageAdmin, request: HttpRequest, alias: str) -> Any:
    return messages.get_queryset(request).using(alias)


def _tables(page: Any, request: HttpRequest) -> Iterator[tuple[Any, str]]:
    """The tables that the user may view: the poison and delayed messages, then the queues."""
    for model in (PoisonMessage, DelayedMessage, *sorted(registry.queues, key=lambda queue: queue._meta.label)):
        messages = page.admin_site._registry.get(model)
        if isinstance(messages, MessageAdmin) and messages.has_view_permission(request):
            for alias in messages.databases():
                yield model, alias


def _empty(tables: Iterable[tuple[Any, str]], readers: Mapping[str, Reader]) -> set[tuple[Any, str]]:
    """The tables without a message: most of many, and two statements tell it of all in a database."""
    by_alias: defaultdict[str, list[Any]] = defaultdict(list)
    for model, alias in tables:
        by_alias[alias].append(model)
    found = set()
    for alias, models in by_alias.items():
        names = [model._meta.db_table for model in models]
        # What cannot be read together is read table by table.
        has_rows = readers[alias].read(partial(rows_in, connections[alias], names))[0] or [None] * len(models)
        found |= {(model, alias) for model, has in zip(models, has_rows, strict=True) if has is False}
    return found


def _keys(messages: MessageAdmin, rows: Any, term: Any) -> list[int]:
    """Keys of the messages with this number, or whose id begins with it."""
    keys = list(rows.filter(pk=int(term.value)).values_list("pk", flat=True)) if _is_number(term.value) else []
    return keys + (messages.keys_of_id(rows, term.value) if len(term.value) >= 4 else [])[: search.MAX_MATCHES]


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 19


def _time(row: Any) -> Any:
    return getattr(row, "failed_at", None) or getattr(row, "due", None) or getattr(row, "enqueued_at", None)
