"""Bases of read-only pages: code writes and deletes their rows."""

from __future__ import annotations

from typing import Any, cast

from django.contrib import admin
from django.http import HttpRequest, HttpResponse

from .databases import OfDatabases
from .features import in_use
from .large_tables.lists import BoundedChangeList, CappedPaginator

#: The permission to operate queues.
OPERATE = "queueapp.operate_queue"


class ReadOnlyAdmin(admin.ModelAdmin):
    """A page whose rows Django's forms neither add, change nor delete."""

    change_form_template = "admin/queueapp/read_only.html"
    change_list_template = "admin/queueapp/list.html"
    empty_value_display = "\u2013"
    object_history_template = "admin/queueapp/history.html"

    class Media:
        css = {"all": ["queueapp/admin.css"]}

    def has_module_permission(self, request: HttpRequest) -> bool:
        """Whether the index shows the page."""
        return in_use(self.model) and self.has_view_permission(request)

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Never."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Never."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Never."""
        return False


class OperatedAdmin(ReadOnlyAdmin):
    """A read-only page whose actions take the permission to operate queues, which lets its holder see it as well."""

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Who may view it, and who may operate queues."""
        return self.has_operate_permission(request) or super().has_view_permission(request, obj)

    def has_operate_permission(self, request: HttpRequest) -> bool:
        """``operate_queue``."""
        return bool(request.user.has_perm(OPERATE))


class ResultsAdmin(ReadOnlyAdmin, OfDatabases):
    """Base of the pages of results, of messages and of tasks, which maintenance deletes after a while. The list is in
    the order of its key and is read in windows, for any size."""

    #: The list's title.
    title = ""
    #: The noun for one row.
    rows_are = "result"
    #: The order of the list, which an index gives.
    list_order = "pk"

    actions = None
    sortable_by = ()
    list_per_page = 100
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    paginator = CappedPaginator
    search_fields = ("pk",)  # shows the search box; get_search_results decides
    change_list_template = "admin/queueapp/message_list.html"

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[BoundedChangeList]:
        """The list that reads windows."""
        return BoundedChangeList

    def prepare_rows(self, rows: list[Any]) -> None:
        """Called once with the rows of a page, to fetch related data in one query."""

    def is_key(self, value: str) -> bool:
        """Whether this can be the key of a row."""
        raise NotImplementedError

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest | None = None) -> bool:
        """Only look-ups that an index or a window serves."""
        column, filters = self.list_order.lstrip("-"), cast(Any, self.list_filter)
        bounds = {f"{column}__gte", f"{column}__lte"}
        return lookup in {spec.parameter_name for spec in filters} or (lookup in bounds and self.is_key(value))

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        """The list, or a note if its table is missing."""
        show, context = super().changelist_view, {"title": self.title, **(extra_context or {})}
        return self.or_note(request, self.database(request), lambda: show(request, context))
