"""Search by what is in a message: its type, headers, recipient, error, or a value in its JSON body.

No index serves these. The database reads a slice of a table along its primary key and tells which rows may match
(``SearchedTable.candidates``); only these are read and compared here. So the comparison is the same on every database,
also for bodies that are no JSON, and most rows never leave the server.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from time import monotonic
from typing import Any

from django.db import connections
from django.db.models import Case, Q, QuerySet, Value, When
from django.db.models.lookups import GreaterThan

from ... import registry
from ...errors import UndecodableMessage
from ...messages import codec_for, read_head, readable_headers
from ...messages.bodies import encoded_content_types
from ...messages.body_filters import SUFFIXES, is_wrapped
from ...models import BytesField
from ...sql import nonblocking
from ...sql.orm import BodyContains, ContainsAny, Scan, scan

#: Rows that the search of a list looks at, those of its first statement, and the time for it.
MAX_ROWS, FIRST_ROWS = 50_000, 5_000
MAX_SECONDS = timedelta(seconds=4).total_seconds()
#: Matches that the search of a list returns, and rows that one statement fetches to be compared.
MAX_MATCHES, BATCH = 200, 1_000
#: Bytes of a body, and characters of headers and of an error, that are read.
MAX_BODY, MAX_TEXT = 64 * 1024, 8192

KINDS = ("id", "correlation", "type", "to", "header", "error", "body", "text")
HELP = (
    "An id or its beginning, a number, or: correlation:…, type:…, to:recipient, header:name=value, error:text, "
    "path.in.body=value. Several are combined."
)
_PREFIXED = re.compile(r"(id|correlation|type|to|header|error):(.*)", re.S)
_PATH = re.compile(r"[\w$@-]+(\.[\w$@-]+)*")
_PLAIN = re.compile(r"[\w .:+-]*", re.A)  # JSON escapes nothing of it
#: Of more queues than these a statement does not name those that the user may view.
_MAX_NAMED = 500
_ID = re.compile(r"[0-9a-f]{4,32}")


@dataclass(frozen=True)
class Term:
    """One condition. ``name``: of a header, or the path in a body."""

    kind: str
    value: str
    name: str = ""


def parse(text: str) -> list[Term]:
    """The terms of a query, divided by blanks; a value with blanks is quoted."""
    words = re.findall(r'(?:[^\s"]|"[^"]*")+', text)
    return [_term(word.replace('"', "")) for word in words] or ([Term("text", text)] if text.strip() else [])


def _term(word: str) -> Term:
    prefixed = _PREFIXED.fullmatch(word)
    if prefixed is not None:
        kind, value = prefixed.groups()
        if kind != "header":
            return Term(kind, value.lower().replace("-", "") if kind == "id" else value)
        name, _, value = value.partition("=")
        return Term("header", value, name)
    path, equals, value = word.partition("=")
    if equals and _PATH.fullmatch(path):
        return Term("body", value, path)
    digits = word.lower().replace("-", "")
    return Term("id", digits) if _ID.fullmatch(digits) and not word.isdigit() else Term("text", word)


@dataclass
class Looked:
    """The result for one table. ``rows``: how many were looked at; ``complete``: whether that is all. ``closed``:
    bodies that were not searched, because they are encrypted, compressed or longer than ``MAX_BODY``, or belong to a
    queue that the user may not view."""

    keys: list[int] = field(default_factory=list)
    rows: int = 0
    complete: bool = True
    closed: int = 0

    def __str__(self) -> str:
        """What was not looked at; '' if there is no such thing."""
        parts = []
        if len(self.keys) >= MAX_MATCHES:
            parts.append(f"the first {len(self.keys):,} that match are shown")
        elif not self.complete:
            parts.append(f"only {self.rows:,} messages were read")
        return "; ".join([*parts, *([closed_bodies(self.closed)] if self.closed else [])])


def closed_bodies(count: int) -> str:
    """That so many bodies were not searched."""
    bodies = "1 body was" if count == 1 else f"{count:,} bodies were"
    return f"{bodies} not searched: encrypted, compressed, too long, or not yours to view"


class ContentSearch:
    """One search over any number of tables."""

    def __init__(self, terms: Sequence[Term], may_view: Callable[[str], bool] = lambda queue: True) -> None:
        """``may_view``: whether the bodies of a queue's messages may be searched."""
        self._terms = terms
        self._may_view = may_view
        self._in_bodies = any(term.kind in ("body", "text") for term in terms)
        #: Bytes that a body must contain: most need not be parsed.
        self._needles = [term.value.encode() for term in terms if term.kind == "body" and _PLAIN.fullmatch(term.value)]
        self._viewed: list[str] | None = None

    def look(self, rows: QuerySet[Any], descending: bool = False) -> Looked:
        """Search the first ``MAX_ROWS`` rows along their primary key, or as many as ``MAX_SECONDS`` allow."""
        found, ends_at = Looked(complete=False), monotonic() + MAX_SECONDS
        table = self.table(rows, descending)
        if not table.can_match:
            return Looked()
        end: int | None = None
        looked_at, size = 0, FIRST_ROWS
        while (limit := min(size, MAX_ROWS - looked_at)) > 0 and (began := monotonic()) < ends_at:
            (part,) = scan(connections[rows.db], [table.slice(end, limit)])
            # A statement that takes too long ends the page: half of the time, since the next rows may be larger.
            size = int(limit * (ends_at - monotonic()) / 2 / max(monotonic() - began, 0.001))
            end = table.compare(part, found, BATCH, lambda: len(found.keys) < MAX_MATCHES and monotonic() < ends_at)
            if end != table.end_of(part):
                return found
            looked_at += part.rows
            found.rows, found.complete = looked_at, part.rows < limit
            if found.complete:
                break
        return found

    def table(self, rows: QuerySet[Any], descending: bool = False) -> SearchedTable:
        """These rows, to be searched along their primary key."""
        return SearchedTable(self, rows, descending)

    # -- which rows the database need not return -------------------------------------------------------------------

    def candidates(self, names: Collection[str]) -> Q | None:
        """A condition that every row meets that matches, or whose body is closed, in a table with these columns; None:
        no row can match."""
        found = Q()
        for term in self._terms:
            conditions = self._may_match(term, names)
            if conditions is None:
                continue
            if not conditions:
                return None
            either = Q()
            for condition in conditions:
                either |= condition if isinstance(condition, Q) else Q(condition)
            found &= either
        return found

    def _may_match(self, term: Term, names: Collection[str]) -> list[Any] | None:
        """Conditions of which each row meets one that matches the term; None: the database cannot tell."""
        value = term.value
        if not value or _PLAIN.fullmatch(value) is None or term.kind == "id":
            return None
        # A text with escapes is read here.
        in_headers = [ContainsAny("headers", [value, "\\"])] if "headers" in names else []
        if term.kind == "header":
            return in_headers
        if term.kind == "to":
            return [Q(**{name: value}) for name in ("recipient", "consumer") if name in names]
        if term.kind == "correlation":
            return in_headers + ([Q(correlation_id=value)] if "correlation_id" in names else [])
        if term.kind == "type":
            return in_headers + ([ContainsAny("message_type", [value])] if "message_type" in names else [])
        if term.kind == "error":
            # A text may begin in one column and end in the next, a word may not.
            words = value.split()
            return [ContainsAny(name, words) for name in _ERRORS if name in names] if words else None
        # In this order: a long body need not be read to be compared here.
        in_body = [*self._closed(names), BodyContains(value)]
        if term.kind == "body":
            return in_body
        texts = ("correlation_id", "recipient", "consumer", *_ERRORS)
        words = value.split() or [value]
        return in_headers + in_body + [ContainsAny(name, words) for name in texts if name in names]

    def _closed(self, names: Collection[str]) -> list[Any]:
        """Conditions of the rows whose bodies must be decoded, or may not be searched: whether they contain a text is
        not asked of the database. Who may not read a body learns nothing of it from what is counted."""
        from .lists import ByteLength

        encoded = ContainsAny("headers", [*SUFFIXES, *encoded_content_types(), "\\"])
        found: list[Any] = [GreaterThan(ByteLength("body"), MAX_BODY), encoded]
        if name := next((name for name in ("destination", "queue") if name in names), ""):
            viewed = Q(**{f"{name}__in": self._viewed_queues()})
            if name == "destination" and "queue" in names:
                viewed = Q(destination="", queue__in=self._viewed_queues()) | (viewed & ~Q(destination=""))
            found.append(~viewed)
        return found

    def _viewed_queues(self) -> list[str]:
        """The labels of the queues whose bodies may be searched; others, of which ``may_view`` decides, may exist."""
        if self._viewed is None:
            labels = [queue._meta.label for queue in registry.queues]
            self._viewed = ["", *filter(self._may_view, labels)] if len(labels) <= _MAX_NAMED else [""]
        return self._viewed

    # -- comparing -------------------------------------------------------------------------------------------------

    def matches(self, row: dict[str, Any], found: Looked) -> bool:
        """Whether a row matches all terms."""
        return all(self._matches(term, row, found) for term in self._terms)

    def _matches(self, term: Term, row: dict[str, Any], found: Looked) -> bool:
        value = term.value
        if not value and term.kind not in ("header", "body"):
            return False
        headers = row.get("start_of_headers") or ""
        if term.kind == "id":
            identity = str(row.get("message_id") or row.get("id") or "").replace("-", "")
            return identity.startswith(value)
        if term.kind == "to":
            return value in (row.get("recipient"), row.get("consumer"))
        if term.kind == "correlation":
            return value == row.get("correlation_id") or value in readable_headers(headers).values()
        if term.kind == "header":
            return readable_headers(headers).get(term.name) == value
        if term.kind == "type":
            return value.lower() in _type(row, headers).lower()
        if term.kind == "error":
            return value.lower() in _error(row).lower()
        if term.kind == "body":
            return self._in_body(term, row, headers, found)
        everything = (row.get("correlation_id"), row.get("recipient"), row.get("consumer"), headers, _error(row))
        return any(value.lower() in text.lower() for text in everything if text) or self._in_body(
            term, row, headers, found
        )

    def _in_body(self, term: Term, row: dict[str, Any], headers: str, found: Looked) -> bool:
        start, size = row["start"], row["size"]
        if start is None:
            return False
        queue = row.get("destination") or row.get("queue") or ""
        if size > MAX_BODY or is_wrapped(_head(headers)[1]) or (queue and not self._may_view(queue)):
            found.closed += 1
            return False
        body = bytes(start)
        if term.kind == "text":
            return term.value.encode() in body
        codec = codec_for(_head(headers)[1])
        if codec is None and any(needle not in body for needle in self._needles):
            return False
        try:
            plain = json.loads(body) if codec is None else codec.decode(body)
            return _at_path(plain, term.name.split("."), term.value)
        except Exception:  # whatever the codec of a project raises, or a value that JSON has not
            return False


class SearchedTable:
    """The rows of one table in a search, in the order of their primary key."""

    def __init__(self, search: ContentSearch, rows: QuerySet[Any], descending: bool) -> None:
        from .lists import ByteLength, Start

        names = {column.name for column in rows.model._meta.local_concrete_fields}
        candidates = search.candidates(names)
        #: Whether a row of this table can match at all.
        self.can_match = candidates is not None
        self._search, self._descending = search, descending
        self._rows = nonblocking(rows).order_by("-pk" if descending else "pk")
        self._candidates = candidates or Q()
        texts = {f"start_of_{name}": Start(name, MAX_TEXT) for name in _TEXTS if name in names}
        bodies: dict[str, Any] = {}
        if search._in_bodies:
            bodies = {"start": Start("body", MAX_BODY, output_field=BytesField()), "size": ByteLength("body")}
        self._wanted = ["pk", *(name for name in _COLUMNS if name in names), *texts, *bodies]
        self._compared = self._rows.filter(self._candidates).annotate(**texts, **bodies)

    def slice(self, after: int | None, limit: int) -> QuerySet[Any]:
        """So many rows behind this key, for ``scan``."""
        is_candidate = Case(When(self._candidates, then=Value(1)), default=Value(0)) if self._candidates else Value(1)
        return self._behind(self._rows, after).values_list("pk", is_candidate)[:limit]

    def _behind(self, rows: QuerySet[Any], key: int | None) -> QuerySet[Any]:
        return rows if key is None else rows.filter(**{f"pk__{'lt' if self._descending else 'gt'}": key})

    def end_of(self, part: Scan) -> int | None:
        """The last key of a slice."""
        return part.low if self._descending else part.high

    def compare(self, part: Scan, found: Looked, batch: int, may_continue: Callable[[], bool]) -> int | None:
        """Compare the candidates of a slice, so many at a time, and add the keys of those that match. Returns the last
        key that this has come to, which is the end of the slice unless ``may_continue`` ended it; None: none."""
        if part.low_match is None:
            return self.end_of(part)
        rows = self._compared.filter(pk__gte=part.low_match, pk__lte=part.high_match)
        last: int | None = None
        while may_continue():
            fetched = list(self._behind(rows, last).values(*self._wanted)[:batch])
            found.keys += [row["pk"] for row in fetched if self._search.matches(row, found)]
            found.rows += len(fetched)
            if len(fetched) < batch:
                return self.end_of(part)
            last = fetched[-1]["pk"]
        return last


_COLUMNS = ("id", "message_id", "correlation_id", "recipient", "consumer", "queue", "destination", "message_type",
            "reason", "exception_type")  # fmt: skip
_TEXTS = ("headers", "exception_message")
#: The columns with the error of a message, in the order in which ``_error`` joins them.
_ERRORS = ("reason", "exception_type", "exception_message")


def _head(headers: str) -> tuple[str, str]:
    try:
        return read_head(headers)
    except UndecodableMessage:
        return "", ""


def _type(row: dict[str, Any], headers: str) -> str:
    return str(row.get("message_type") or _head(headers)[0])


def _error(row: dict[str, Any]) -> str:
    names = ("reason", "exception_type", "start_of_exception_message")
    return " ".join(str(row[name]) for name in names if row.get(name))


def _at_path(value: Any, path: Sequence[str], wanted: str) -> bool:
    """Whether a value at the path is the wanted one. A list on the way stands for each of its elements."""
    if isinstance(value, list):
        return any(_at_path(item, path, wanted) for item in value)
    if path:
        return isinstance(value, dict) and path[0] in value and _at_path(value[path[0]], path[1:], wanted)
    if isinstance(value, str):
        return value == wanted
    return json.dumps(value) == wanted


def needs_content(terms: Iterable[Term]) -> bool:
    """Whether these terms are found by reading rows: a number, or an id alone, has an index or a bisection."""
    terms = list(terms)
    return not (len(terms) == 1 and (terms[0].kind == "id" or (terms[0].kind == "text" and terms[0].value.isdigit())))
