"""Search by what is in a message: its type, headers, recipient, error, or a value in its JSON body.

No index serves these, so rows are read in batches along the primary key and compared here, up to ``MAX_ROWS`` of a
table and ``MAX_SECONDS`` for a search. ``Looked`` says what was not read. The same on every database.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from time import monotonic
from typing import Any

from django.db.models import QuerySet

from ...errors import UndecodableMessage
from ...messages import read_head, readable_headers
from ...messages.body_filters import is_wrapped
from ...models import BytesField
from ...sql import nonblocking

#: Rows of one table that are read, in batches, and the time for a whole search.
MAX_ROWS, BATCH = 50_000, 1_000
MAX_SECONDS = timedelta(seconds=4).total_seconds()
#: Matches of one table that are returned.
MAX_MATCHES = 200
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
    """The result for one table. ``rows``: how many were read; ``complete``: whether that is all. ``closed``: bodies
    that were not searched, because they are encrypted, compressed or longer than ``MAX_BODY``, or belong to a queue
    that the user may not view."""

    keys: list[int] = field(default_factory=list)
    rows: int = 0
    complete: bool = True
    closed: int = 0

    def __str__(self) -> str:
        """What was not looked at; '' if there is no such thing."""
        parts = []
        if not self.complete:
            parts.append(f"only {self.rows:,} messages were read")
        if self.closed:
            bodies = "1 body was" if self.closed == 1 else f"{self.closed:,} bodies were"
            parts.append(f"{bodies} not searched: encrypted, compressed, too long, or not yours to view")
        return "; ".join(parts)


class ContentSearch:
    """One search over any number of tables, which share its time."""

    def __init__(self, terms: Sequence[Term], may_view: Callable[[str], bool] = lambda queue: True) -> None:
        """``may_view``: whether the bodies of a queue's messages may be searched."""
        self._terms = terms
        self._may_view = may_view
        self._ends_at = monotonic() + MAX_SECONDS
        self._in_bodies = any(term.kind in ("body", "text") for term in terms)
        #: Bytes that a body must contain: most need not be parsed.
        self._needles = [term.value.encode() for term in terms if term.kind == "body" and _PLAIN.fullmatch(term.value)]

    @property
    def is_over(self) -> bool:
        """Whether the time has passed."""
        return monotonic() > self._ends_at

    def look(self, rows: QuerySet[Any], descending: bool = False) -> Looked:
        """Search the rows along their primary key."""
        from .lists import ByteLength, Start

        found, last = Looked(), None
        names = {column.name for column in rows.model._meta.local_concrete_fields}
        columns = [name for name in _COLUMNS if name in names]
        texts = {f"start_of_{name}": Start(name, MAX_TEXT) for name in _TEXTS if name in names}
        bodies = {"start": Start("body", MAX_BODY, output_field=BytesField()), "size": ByteLength("body")}
        rows = nonblocking(rows).order_by("-pk" if descending else "pk").annotate(**texts)
        if self._in_bodies:
            rows = rows.annotate(**bodies)
        wanted = ["pk", *columns, *texts, *(bodies if self._in_bodies else ())]
        while found.rows < MAX_ROWS and len(found.keys) < MAX_MATCHES and not self.is_over:
            further = rows if last is None else rows.filter(**{f"pk__{'lt' if descending else 'gt'}": last})
            batch = list(further.values(*wanted)[:BATCH])
            for row in batch:
                if all(self._matches(term, row, found) for term in self._terms):
                    found.keys.append(row["pk"])
            found.rows += len(batch)
            if len(batch) < BATCH:
                return found
            last = batch[-1]["pk"]
        found.complete = False
        return found

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
        if any(needle not in body for needle in self._needles):
            return False
        try:
            return _at_path(json.loads(body), term.name.split("."), term.value)
        except (ValueError, RecursionError):
            return False


_COLUMNS = ("id", "message_id", "correlation_id", "recipient", "consumer", "queue", "destination", "message_type",
            "reason", "exception_type")  # fmt: skip
_TEXTS = ("headers", "exception_message")


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
