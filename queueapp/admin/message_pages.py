"""The base of the pages of waiting, delayed, poison and journaled messages. They are read-only, and every text may be
hostile.

A list of bounded cost, a read-only page per message (facts, headers, body, failed attempts, buttons), the body as a
download, and a delete with the confirm page of every other operation. Django's own form, save and cascade are never
used: they would load whole bodies, and bypass the rules of the queue.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.utils import unquote
from django.contrib.admin.views.main import ALL_VAR, ORDER_VAR, PAGE_VAR, SEARCH_VAR
from django.core.exceptions import BadRequest, PermissionDenied
from django.db.models import Q, QuerySet
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import path
from django.utils.html import format_html
from django.utils.safestring import SafeString

from .. import registry
from ..errors import QueueNotFound, UndecodableMessage
from ..failures.history import read_failures
from ..messages import read_head
from ..models import BytesField, Now, UtcField
from ..sql import nonblocking
from . import body_reader
from .databases import PARAMETER, OfDatabases
from .formatting import display, untrusted
from .large_tables import content_search
from .large_tables.lists import BoundedChangeList, ByteLength, CappedPaginator, Start
from .message_story import related, timeline
from .operations import Operation, actions, confirm_page, is_key

#: Characters of the headers that a list reads to find the type.
_HEAD = 8192
#: Facts about a message, in groups: (title, [(name, value), ...]).
Facts = list[tuple[str, list[tuple[str, Any]]]]

#: The outcome of a failed attempt, by its name in the history.
_VERDICTS = {
    "RetryNow": "retried at once",
    "RetryLater": "retried later",
    "Poison": "kept as poison",
    "Discard": "discarded",
    "Requeued": "requeued by an operator",
}

_PART_OF_ID = re.compile(r"[0-9a-f]{4,32}")


class Button(NamedTuple):
    """One operation on a message's own page."""

    operation: Operation
    post_to: str


class MessageAdmin(OfDatabases):
    """Base of the pages of messages. Subclasses define columns, filters and operations."""

    operations: tuple[Operation, ...] = ()
    #: The noun for one row.
    rows_are = "message"
    object_history_template = "admin/queueapp/history.html"
    #: The field that holds the message's id.
    id_field = "message_id"
    #: The order of the list, which an index gives. Windows are read in this order.
    list_order = "pk"
    #: Look-ups that a URL may have beside the filters, all served by an index.
    url_lookups: frozenset[str] = frozenset()

    list_per_page = 100
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    paginator = CappedPaginator
    search_fields = ("pk",)  # shows the search box; get_search_results decides
    change_list_template = "admin/queueapp/message_list.html"
    message_template = "admin/queueapp/message.html"

    class Media:
        css = {"all": ["queueapp/admin.css"]}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "operations" in cls.__dict__ and "actions" not in cls.__dict__:
            cls.actions = actions(*cls.operations)

    # -- permissions ----------------------------------------------------------------------------------------------

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Never: a message is sent by code, through the producer."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Never: changes are operations with permissions of their own."""
        return False

    def _may(self, request: HttpRequest, action: str) -> bool:
        """Whether the user has Django's ``action`` permission on this model."""
        return bool(request.user.has_perm(f"{self.opts.app_label}.{action}_{self.opts.model_name}"))

    # -- the list -------------------------------------------------------------------------------------------------

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[BoundedChangeList]:
        return BoundedChangeList

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Rows without the columns that may be large, and with a bounded part of them for the list."""
        rows = nonblocking(super().get_queryset(request))
        names = {field.name for field in self.opts.local_concrete_fields}
        return rows.defer(*({"headers", "body", "failures", "traceback", "exception_message"} & names)).annotate(
            head=Start("headers", _HEAD), size=ByteLength("body"), db_now=Now(output_field=UtcField())
        )

    def get_ordering(self, request: HttpRequest) -> tuple[str, ...]:
        return (self.list_order,) if self.list_order.lstrip("-") == self.opts.pk.name else (self.list_order, "pk")

    def filters_of(self, request: HttpRequest) -> dict[str, str] | None:
        """The filters in the address of the list; None: a search or a jump restricts it as well."""
        names = request.GET.keys() - {PARAMETER, ORDER_VAR, PAGE_VAR, ALL_VAR}
        if names & {SEARCH_VAR} and request.GET.get(SEARCH_VAR, "").strip():
            return None
        return {name: str(request.GET[name]) for name in names - {SEARCH_VAR}}

    def prepare_rows(self, rows: list[Any]) -> None:
        """Called once with the rows of a page, to fetch related data in one query."""

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest | None = None) -> bool:
        """Only look-ups that an index serves: any other one in a URL could scan the table."""
        column = self.list_order.lstrip("-")
        own_filters: Any = self.get_list_filter(request)  # type: ignore[arg-type]
        filters = {spec.parameter_name for spec in own_filters if hasattr(spec, "parameter_name")}
        return lookup in {column, f"{column}__gte", f"{column}__lte"} | filters | self.url_lookups

    def get_search_results(self, request: HttpRequest, queryset: QuerySet[Any], search_term: str) -> tuple[Any, bool]:
        term = search_term.strip().lower().replace("-", "")
        if not term:
            return queryset, False
        terms = content_search.parse(search_term)
        if content_search.needs_content(terms):
            return self._search_content(request, queryset, terms), False
        found = Q()
        if term.isascii() and term.isdigit() and len(term) < 19:
            found |= Q(pk=int(term))
        if terms[0].kind == "id":
            term = terms[0].value
        if _PART_OF_ID.fullmatch(term):
            found |= Q(pk__in=self.keys_of_id(queryset, term))
        if not found:
            shown = untrusted.visible(search_term)[:80]
            self.message_user(request, f"“{shown}” is neither a number nor a message id.", messages.WARNING)
            return queryset.none(), False
        return queryset.filter(found), False

    def _search_content(self, request: HttpRequest, queryset: QuerySet[Any], terms: Any) -> QuerySet[Any]:
        """Find messages by what is in them, within the filters of the list; a note says what was not looked at."""
        search = content_search.ContentSearch(terms, partial(may_view, self.admin_site, request))
        looked = search.look(queryset, descending=self.list_order.startswith("-"))
        if unread := str(looked):
            self.message_user(request, f"Not everything was searched: {unread}.", messages.WARNING)
        return queryset.filter(pk__in=looked.keys)

    def keys_of_id(self, rows: QuerySet[Any], term: str) -> list[int]:
        """Keys of the messages whose id is, or begins with, these hex digits. The search must be indexed or bounded."""
        raise NotImplementedError

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        """The list, and operations on selected messages."""
        if not all(is_key(key) for key in request.POST.getlist(ACTION_CHECKBOX_NAME)):
            raise BadRequest("The number of a selected message is not valid.")
        show = super().changelist_view
        return self.or_note(request, self.database(request), lambda: show(request, extra_context))

    # -- columns that all lists have ------------------------------------------------------------------------------

    def action_checkbox(self, obj: Any) -> Any:
        """The check box of a row, labelled with its key instead of its text."""
        box = '<input type="checkbox" name="{}" value="{}" class="action-select" aria-label="Select message {}">'
        return format_html(box, ACTION_CHECKBOX_NAME, obj.pk, obj.pk)

    @admin.display(description="id")
    def short_id(self, row: Any) -> Any:
        return display.short_id(getattr(row, self.id_field))

    @admin.display(description="type")
    def type_name(self, row: Any, longest: int = 60) -> Any:
        kind = self.message_type(row)
        return untrusted.inline(kind, longest) if kind else display.NOTHING

    @admin.display(description="type, message")
    def message(self, row: Any) -> SafeString:
        kind = self.message_type(row)
        texts = [*([untrusted.inline(kind, 60)] if kind else []), *self.besides(row), self.short_id(row)]
        return display.below(*texts)

    def besides(self, row: Any) -> list[Any]:
        """What a list shows between the type and the id. It saves columns: a row has one line."""
        return []

    @admin.display(description="size")
    def body_size(self, row: Any) -> str:
        return display.size(row.size)

    def message_type(self, row: Any) -> str:
        """The message type of the headers; '' without one, or if the headers are too long to be read."""
        try:
            return read_head(row.head)[0]
        except UndecodableMessage:
            return ""

    def describe(self, row: Any) -> Any:
        """One line about a message, for confirm pages."""
        identity = getattr(row, self.id_field)
        return format_html("{} · {}", identity, self.type_name(row)) if self.message_type(row) else identity

    # -- the page of one message ----------------------------------------------------------------------------------

    def get_urls(self) -> list[Any]:
        name = f"{self.opts.app_label}_{self.opts.model_name}_body"
        view = self.admin_site.admin_view(self.body_view)
        return [path("<path:object_id>/body/", view, name=name), *super().get_urls()]

    def list_with(self, message: Any) -> str:
        """The address of a list that contains this message, for its buttons."""
        return self.list_url(message._state.db)

    def queues_of_body(self, message: Any) -> set[str]:
        """The queues whose messages the user must be allowed to see to read the body; none: the permission of this page
        is enough."""
        return set()

    def may_see_body(self, request: HttpRequest, message: Any) -> bool:
        """Whether this user may read the body of this message."""
        return all(may_view(self.admin_site, request, queue) for queue in self.queues_of_body(message))

    def facts(self, request: HttpRequest, message: Any) -> Facts:
        """The facts about a message beside headers, body and failures."""
        raise NotImplementedError

    def change_view(self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: Any = None) -> Any:
        """The read-only page of one message."""
        if request.method not in ("GET", "HEAD"):
            raise PermissionDenied
        return self.page_of(request, object_id, lambda message: self._page(request, message, extra_context))

    def _page(self, request: HttpRequest, message: Any, extra_context: Any) -> HttpResponse:
        may_see_body, identity = self.may_see_body(request, message), getattr(message, self.id_field)
        offered = [op for op in self.operations if op.offered(message) and op.allowed(self, request)]
        headers = untrusted.headers(message.start_of_headers)
        lines: list[tuple[str, str]] = [
            (untrusted.breakable(name), untrusted.breakable(two)) for name, two in headers.rows
        ]
        context = {
            **self.admin_site.each_context(request),
            "title": self.title_of(message),
            "opts": self.opts,
            "selected": message.pk,
            "original": self.named_row(message),
            "has_history": bool(self.operations),
            "change": True,
            "is_popup": False,
            "has_view_permission": True,
            "media": self.media,
            "preserved_filters": self.get_preserved_filters(request),
            "buttons": [Button(op, self.list_with(message)) for op in offered],
            "facts": [*self.facts(request, message), ("Related", related(self, request, message, identity))],
            "timeline": timeline(message, identity),
            "headers": headers._replace(rows=lines),
            # Not fetched for a user who may not see it.
            **(self._body(request, message) if may_see_body else {"body": None}),
            "body_of": [untrusted.inline(queue, 200) for queue in sorted(self.queues_of_body(message))],
            "body_size": display.size(message.size),
            "failures": self._failures(message),
            "list_url": self.list_url(message._state.db),
            **self.more_of(request, message),
            **(extra_context or {}),
        }
        request.current_app = self.admin_site.name  # type: ignore[attr-defined]
        return TemplateResponse(request, self.message_template, context)

    def _body(self, request: HttpRequest, message: Any) -> dict[str, Any]:
        start = self._start_of_body(message)
        found = body_reader.read(request, self, message, start)
        if found is None:
            return {"body": untrusted.body(start, message.size)}
        return {
            "body": untrusted.body(found.body and found.body[: untrusted.SHOWN], found.size),
            "body_note": untrusted.visible(found.note)[:500],
        }

    def more_of(self, request: HttpRequest, message: Any) -> dict[str, Any]:
        """Additional context of the template."""
        return {}

    def title_of(self, message: Any) -> str:
        return f"Message {getattr(message, self.id_field)}"

    def body_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """The stored body as a download that no browser opens or runs."""
        alias = self.place_of(unquote(object_id))[0]
        return self.or_note(request, alias, lambda: self._download(request, object_id))

    def _download(self, request: HttpRequest, object_id: str) -> HttpResponse:
        message = self._find(request, object_id)
        if message is None:
            raise Http404
        if not self.may_see_body(request, message):
            raise PermissionDenied
        response = HttpResponse(message.body or b"", content_type="application/octet-stream")
        response["Content-Disposition"] = f'attachment; filename="{getattr(message, self.id_field)}.bin"'
        response["X-Content-Type-Options"] = "nosniff"
        response["Content-Security-Policy"] = "default-src 'none'; sandbox"
        response["Cache-Control"] = "no-store"
        return response

    def delete_view(self, request: HttpRequest, object_id: str, extra_context: Any = None) -> Any:
        """Django links here to delete one object: the confirm page of the operation."""
        delete = next(op for op in self.operations if op.name == "delete_selected")

        def ask(message: Any) -> HttpResponse:
            only = self.get_queryset(request).using(message._state.db).filter(pk=message.pk)
            return confirm_page(delete, self, request, only, post_to=self.list_with(message))

        if not delete.allowed(self, request):
            raise PermissionDenied
        return self.page_of(request, object_id, ask)

    def history_title(self, row: Any) -> str:
        title = self.title_of(row)
        return f"History of {title[0].lower()}{title[1:]}"

    def history_view(self, request: HttpRequest, object_id: str, extra_context: Any = None) -> Any:
        """The log entries of one message."""
        show = super().history_view
        return self.page_of(request, object_id, lambda _: show(request, object_id, extra_context))

    def page_of(self, request: HttpRequest, object_id: str, view: Callable[[Any], HttpResponse]) -> HttpResponse:
        """A page about one message, or the list with a note if the message is gone."""

        def find_and_show() -> HttpResponse:
            message = self._find(request, object_id)
            return self._gone(request, object_id) if message is None else view(message)

        return self.or_note(request, self.place_of(unquote(object_id))[0], find_and_show)

    def _find(self, request: HttpRequest, object_id: str) -> Any:
        message = self.get_object(request, unquote(object_id))
        if not self.has_view_permission(request, message):
            raise PermissionDenied
        return message

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Any:
        """One message with the start of its headers. Only the start of the body is fetched, where it is shown."""
        alias, primary = self.place_of(object_id)
        if not is_key(primary):
            return None
        rows = self.get_queryset(request).using(alias)
        return rows.annotate(start_of_headers=Start("headers", untrusted.SHOWN)).filter(pk=int(primary)).first()

    def _gone(self, request: HttpRequest, object_id: str) -> HttpResponse:
        which = untrusted.visible(unquote(object_id))[:40]
        text = f"Message {which} is gone: it was handled, moved or deleted."
        self.message_user(request, text, messages.WARNING)
        return HttpResponseRedirect(self.list_url(self.place_of(unquote(object_id))[0]))

    def _start_of_body(self, message: Any) -> bytes | None:
        rows = nonblocking(self.model._base_manager.using(message._state.db)).filter(pk=message.pk)
        start = Start("body", untrusted.SHOWN, output_field=BytesField())
        return rows.annotate(start=start).values_list("start", flat=True).first()

    def _failures(self, message: Any) -> list[dict[str, Any]]:
        if not any(field.name == "failures" for field in self.opts.local_concrete_fields):
            return []
        history = read_failures(message.failures)
        names = ("attempt", "exception", "host", "process")
        return [
            {name: untrusted.visible(str(entry.get(name, "")))[:500] for name in names}
            | {"at": display.moment_of_text(entry.get("at")), "then": _then(entry.get("verdict", ""))}
            for entry in history[-50:]
            if isinstance(entry, dict)
        ]


def _then(verdict: Any) -> str:
    """The outcome of a failed attempt in words."""
    name = untrusted.visible(str(verdict))[:500]
    return _VERDICTS.get(name, name)


def may_view(admin_site: Any, request: HttpRequest, queue: str) -> bool:
    """Whether the user may see the messages of the queue with this label, table or address. The page of the queue
    decides, if it has one."""
    try:
        model = registry.queues.find_addressed(queue)[0]
    except QueueNotFound:
        app, _, name = queue.partition("@")[0].lower().rpartition(".")
    else:
        page = admin_site._registry.get(model)
        if page is not None:
            return bool(page.has_view_permission(request))
        app, name = model._meta.app_label, model._meta.model_name
    # As in Django's admin, the change permission includes viewing.
    return any(request.user.has_perm(f"{app}.{verb}_{name}") for verb in ("view", "change"))
