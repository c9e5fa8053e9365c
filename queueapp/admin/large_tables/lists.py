"""Lists over tables of any size: no page takes longer because the table has grown.

Three rules: the count stops at ``COUNTED``, and with it the deepest page. An index gives the order. A filter without an
index (a state, a type, part of an id) reads a window of ``WINDOW`` rows; the page says so and links to the next window.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from django.contrib import admin
from django.contrib.admin.views.main import PAGE_VAR
from django.core.paginator import Paginator
from django.db.models import BigIntegerField, Field, Func, QuerySet, TextField, Value
from django.http import HttpRequest

from ..databases import StrictChangeList
from ..formatting.display import at_least
from . import search


class CappedPaginator(Paginator):
    """A paginator whose count is at most ``COUNTED`` + 1."""

    @cached_property
    def count(self) -> int:  # type: ignore[override]
        return capped_count(self.object_list)


def capped_count(rows: Any) -> int:
    """The number of rows, or ``COUNTED`` + 1. Without an order, so that any rows can be counted."""
    return int(rows.order_by().values("pk")[: search.COUNTED + 1].count())


class ByteLength(Func):
    """The size of a body in bytes without reading it: PostgreSQL has it in the row header, compressed or not."""

    function = "OCTET_LENGTH"
    output_field: Field = BigIntegerField()

    def as_microsoft(self, compiler: Any, connection: Any, **context: Any) -> Any:
        return self.as_sql(compiler, connection, function="DATALENGTH", **context)


class Start(Func):
    """The first ``length`` bytes or characters of a column, so that a page never fetches a body of a gigabyte."""

    function = "SUBSTRING"

    def __init__(self, column: str, length: int, output_field: Field | None = None) -> None:
        super().__init__(column, Value(1), Value(length), output_field=output_field or TextField())


class BoundedFilter(admin.SimpleListFilter):
    """A filter without an index: ``BoundedChangeList`` limits it to a window."""


class BoundedChangeList(StrictChangeList):
    """A change list with a capped count ("10,000+"), whose filters without an index read a window only.

    The list may start anywhere in its order (``?seq__gte=123``), to get beyond the window and beyond the deepest page.
    """

    #: The last value of the window's column that was read; None: all rows were read.
    window_end: Any = None

    @property
    def rows_are(self) -> str:
        """The noun for one row."""
        return str(self.model_admin.rows_are)

    def get_queryset(self, request: HttpRequest, exclude_parameters: Any = None) -> QuerySet[Any]:
        found = super().get_queryset(request, exclude_parameters)
        self.column, self.descending = self._direction(found)
        if not any(isinstance(spec, BoundedFilter) and spec.value() is not None for spec in self.filter_specs):
            return found
        rows = self.root_queryset.order_by(f"-{self.column}" if self.descending else self.column)
        if self.start is not None:
            rows = rows.filter(**{self.start_parameter: self.start})
        # Skips index entries and reads one row: 10 ms.
        end = list(rows.values_list(self.column, flat=True)[search.WINDOW - 1 : search.WINDOW])
        if not end:
            return found
        self.window_end = end[0]
        return found.filter(**{f"{self.column}__{'gte' if self.descending else 'lte'}": end[0]})

    def _direction(self, found: QuerySet[Any]) -> tuple[str, bool]:
        list_order: str = self.model_admin.list_order
        first = str(found.query.order_by[0]) if found.query.order_by else list_order
        column = list_order.lstrip("-")
        return column, (first if first.lstrip("-") in (column, "pk") else list_order).startswith("-")

    @property
    def start_parameter(self) -> str:
        """The URL parameter of the start of the list."""
        return f"{self.column}__{'lte' if self.descending else 'gte'}"

    @property
    def start(self) -> str | None:
        """The start of the list; None: its beginning."""
        return self.params.get(self.start_parameter)

    @property
    def from_the_beginning(self) -> str:
        """The query string of the same list from its beginning."""
        return self.get_query_string(remove=[self.start_parameter, PAGE_VAR])

    @property
    def further(self) -> str:
        """The query string of the rows after this window, or after the deepest page; '' without any."""
        value = self.window_end
        if value is None and not self.counted_all and self.page_num == self.paginator.num_pages and self.result_list:
            value = getattr(self.result_list[-1], self.column)
        if value is None:
            return ""
        value = value.isoformat() if hasattr(value, "isoformat") else value
        return self.get_query_string({self.start_parameter: value}, remove=[PAGE_VAR])

    @property
    def window_size(self) -> int:
        """The rows that a filter without an index reads."""
        return search.WINDOW

    @property
    def counted_all(self) -> bool:
        """Whether the count is exact."""
        return bool(self.result_count <= search.COUNTED)

    @property
    def count_text(self) -> str:
        """The capped number of matching rows."""
        return at_least(self.result_count, search.COUNTED)

    @property
    def pages(self) -> Any:
        """Page numbers for the template; empty with one page."""
        return self.paginator.get_elided_page_range(self.page_num) if self.multi_page else ()

    def get_results(self, request: HttpRequest) -> None:
        """One page of rows, with related data fetched once and not per row."""
        super().get_results(request)
        # Equal, so that Django does not repeat the count beside the search box without its "+".
        self.full_result_count = self.result_count
        self.result_list = list(self.result_list)
        self.model_admin.prepare_rows(self.result_list)
