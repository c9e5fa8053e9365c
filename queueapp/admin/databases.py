"""Choosing the database of a page: every database with queues has the tables of queueapp, with rows of their own.

A list shows one database; a filter selects it where there are several. The key of a row names its database unless it is
the first one: ``17``, ``warehouse:17``. Operations on a row run in the database that the row was read from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

from django.contrib import admin, messages
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.utils import quote, unquote
from django.contrib.admin.views.main import ERROR_FLAG, SEARCH_VAR, ChangeList
from django.db import DatabaseError, DataError, InterfaceError, connections, router, transaction
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import reverse
from django.utils.http import urlencode

from .. import delayed, registry
from ..models import QueueControl
from ..sql import ErrorKind, backend_of
from .formatting import untrusted

PARAMETER = "database"
#: Milliseconds of one statement of a page; then the page is a note. (On SQL Server the driver's query_timeout decides.)
STATEMENT_MS = 5_000


class DatabaseFilter(admin.SimpleListFilter):
    """Selects the database of the list, by default the first. Hidden with one database."""

    title = "database"
    parameter_name = PARAMETER

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        self.first, *other_aliases = model_admin.databases()
        return [(alias, alias) for alias in other_aliases]

    def choices(self, changelist: Any) -> Iterator[Any]:
        first_choice, *choices = super().choices(changelist)
        yield {**first_choice, "display": self.first}
        yield from choices

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        return queryset  # get_queryset of the page has chosen


class StrictChangeList(ChangeList):
    """A list whose filters accept only the values that they offer, and whose links name the database."""

    model_admin: Any

    def get_filters(self, request: HttpRequest) -> Any:
        """Django's filters, but a value that is not offered is refused: with a mistyped filter the list would show
        everything, and "select all" would mean everything. A NUL is refused, because PostgreSQL accepts it in no
        text."""
        if any("\0" in value for name in request.GET if name != SEARCH_VAR for value in request.GET.getlist(name)):
            raise IncorrectLookupParameters("a NUL")
        result = super().get_filters(request)
        for spec in result[0]:
            if spec.template == "admin/filter.html":
                spec.template = "admin/queueapp/filter.html"
            if not isinstance(spec, admin.SimpleListFilter) or spec.value() is None:
                continue
            if all(str(value) != spec.value() for value, _ in spec.lookup_choices):
                raise IncorrectLookupParameters(f"{spec.parameter_name}={spec.value()}")
        return result

    def url_for_result(self, result: Any) -> str:
        """The address of a row's page."""
        return str(self.model_admin.url_of(result))


class Named(NamedTuple):
    """The key and the escaped name that Django's templates ask of an object."""

    pk: Any
    name: str

    def __str__(self) -> str:
        return self.name


class OfDatabases(admin.ModelAdmin):
    """A page over a table that may be in several databases."""

    def databases(self) -> list[str]:
        """The databases whose rows this page shows: the router's for this table, then those of queues, and those that
        keep delayed messages for them."""
        first = router.db_for_write(self.model)
        other_databases = {
            alias for queue in registry.queues for alias in (router.db_for_write(queue), *delayed.stores_of(queue))
        }
        return [first, *sorted(other_databases - {first})]

    def database(self, request: HttpRequest) -> str:
        """The database that this request's list shows."""
        known = self.databases()
        chosen = request.GET.get(PARAMETER, known[0])
        return chosen if chosen in known else known[0]

    def key_of(self, row: Any) -> str:
        """The key of a row in the URL of its page."""
        return self._key_in(row._state.db, row.pk)

    def _key_in(self, alias: str, primary: Any) -> str:
        return str(primary) if alias == self.databases()[0] else f"{alias}:{primary}"

    def place_of(self, key: str) -> tuple[str, str]:
        """The inverse of ``key_of``: (database, primary key). For an unknown database, a key that no row has."""
        alias, separator, primary = key.rpartition(":")
        known = self.databases()
        if not separator:
            return known[0], key
        return (alias, primary) if alias in known else (known[0], "")

    def url_of(self, row: Any, page: str = "change") -> str:
        """The address of a row's page."""
        return self.url_in(row._state.db, row.pk, page)

    def url_in(self, alias: str, primary: Any, page: str = "change") -> str:
        """The address of the page of a row in this database."""
        name = f"{self.admin_site.name}:{self.opts.app_label}_{self.opts.model_name}_{page}"
        return reverse(name, args=(quote(self._key_in(alias, primary)),))

    def list_url(self, database: str | None = None, **filters: str) -> str:
        """The URL of the list for one database, with these filters."""
        if database is not None and database != self.databases()[0]:
            filters[PARAMETER] = database
        url = reverse(f"{self.admin_site.name}:{self.opts.app_label}_{self.opts.model_name}_changelist")
        return f"{url}?{urlencode(filters)}" if filters else url

    def named_row(self, row: Any) -> Named:
        """A row as Django's templates link to it, by the key that names its database."""
        return Named(self.key_of(row), untrusted.visible(str(row))[:100])

    def change_view(self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: Any = None) -> Any:
        """The page of a row, or a note."""
        show, alias = super().change_view, self.place_of(unquote(object_id))[0]
        return self.or_note(request, alias, lambda: show(request, object_id, form_url, extra_context))

    def render_change_form(self, request: HttpRequest, context: Any, *args: Any, **kwargs: Any) -> Any:
        """Django's, without ``str(row)`` in titles and breadcrumbs: it may contain invisible characters."""
        if (row := kwargs.get("obj")) is not None:
            named = self.named_row(row)
            context |= {"subtitle": named.name, "original": named}
        return super().render_change_form(request, context, *args, **kwargs)

    def history_title(self, row: Any) -> str:
        return f"History of {self.opts.verbose_name} {self.named_row(row)}"

    def history_view(self, request: HttpRequest, object_id: str, extra_context: Any = None) -> HttpResponse:
        """The log entries of a row."""
        row = self.get_object(request, unquote(object_id))
        named = {} if row is None else {"object": self.named_row(row), "title": self.history_title(row)}
        return super().history_view(request, object_id, {**named, **(extra_context or {})})

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return StrictChangeList

    def get_queryset(self, request: HttpRequest) -> Any:
        """From the primary database: a replica may show rows that are gone."""
        return super().get_queryset(request).using(self.database(request))

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        """Django's list, with a warning where Django ignores an invalid filter and shows everything."""
        response = super().changelist_view(request, extra_context)
        if response.get("Location") == f"{request.path}?{ERROR_FLAG}=1":
            text = "The URL has a filter or a value that this list does not offer: everything is shown instead."
            self.message_user(request, text, messages.WARNING)
        return response

    # -- a database that does not answer, or has no such table ---------------------------------------------------------

    def or_note(self, request: HttpRequest, alias: str, view: Callable[[], HttpResponse]) -> HttpResponse:
        """The response of the view, or a redirect to the overview with a note if the table is missing or its database
        does not answer."""
        # A GET runs within a savepoint, so that a missing table does not break the request's own transaction. An
        # operation commits batch by batch, so it must not run in one.
        guard = _reading(alias) if request.method == "GET" else nullcontext()
        try:
            with guard:
                return view()
        except (DatabaseError, InterfaceError) as error:
            cause = note_of(error, alias, self.opts.db_table)
            if not cause:
                raise
        self.message_user(request, f"{self.named(alias)}: {cause}", messages.ERROR)
        overview = self.admin_site._registry.get(QueueControl)
        may_see = overview is not None and overview.has_view_permission(request)
        page = "queueapp_queuecontrol_changelist" if may_see else "index"
        return HttpResponseRedirect(reverse(f"{self.admin_site.name}:{page}"))

    def named(self, alias: str) -> str:
        """The name of the page in a note."""
        return f"{str(self.opts.verbose_name_plural).capitalize()} of database {alias!r}"


@contextmanager
def _reading(alias: str) -> Iterator[None]:
    """A savepoint in which no statement takes longer than ``STATEMENT_MS``."""
    connection = connections[alias]
    with transaction.atomic(using=alias), backend_of(connection).sessions.statement_timeout(connection, STATEMENT_MS):
        yield


def note_of(error: Exception, alias: str, table: str) -> str:
    """The note for a missing or unreadable table, or a database that does not answer; '' for any other error. If the
    database of the overview does not answer, no page can show a note."""
    if isinstance(error, DataError):
        # 'infinity', or a year beyond 9999: another program stored it, and the driver refuses to read it.
        return f"a value in the table {table!r} cannot be read: {str(error).splitlines()[0]}"
    kind = backend_of(connections[alias]).error_kind(error)
    if kind is ErrorKind.MISSING:
        return f"the table {table!r} does not exist, or lacks a column."
    if kind is ErrorKind.EXHAUSTED:
        return (
            f"a statement took longer than {STATEMENT_MS // 1000} s, or the server lacks memory or disk. Choose a "
            "narrower filter, and see Databases for what makes the server slow."
        )
    if kind is ErrorKind.CONNECTION and alias != router.db_for_write(QueueControl):
        return f"the database {alias!r} cannot be reached."
    return ""
