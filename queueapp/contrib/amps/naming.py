"""Names of classes and tables out of names of queues, which may be anything: ``orders/new``, ``^X$``, ``class``."""

from __future__ import annotations

import keyword
import re
import unicodedata

#: Of a table; PostgreSQL cuts names at 63 bytes, and the names of indexes are made from it.
LONGEST = 50


class Names:
    """Names that were given; each is given once. Django compares names of models without case."""

    def __init__(self, taken: tuple[str, ...]) -> None:
        self._taken = {name.lower() for name in taken}
        self._tables: set[str] = set()

    def of(self, queue: str) -> tuple[str, str]:
        """(class, table) for a queue of this name."""
        words = _words(queue)
        stem = "".join(word[:1].upper() + word[1:] for word in words)[:LONGEST]
        if not stem[:1].isalpha():
            stem = f"Q{stem}" if stem else "Queue"
        if stem.lower() in self._taken or keyword.iskeyword(stem):
            stem = f"{stem}Queue"
        table = "_".join(word.lower() for word in words)[:LONGEST].strip("_")
        if not table[:1].isalpha():
            table = f"q_{table}" if table else "queue"
        return _unused(stem, self._taken, "{}{}"), _unused(table, self._tables, "{}_{}")


def _words(name: str) -> list[str]:
    """The runs of letters and digits in it, without accents; a hump (``newOrders``) begins a word."""
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
    return re.findall(r"[A-Z]+(?![a-z])[0-9]*|[A-Z]?[a-z]+[0-9]*|[0-9]+", plain)


def _unused(name: str, taken: set[str], numbered: str) -> str:
    number, candidate = 1, name
    while candidate.lower() in taken:
        number += 1
        candidate = numbered.format(name, number)
    taken.add(candidate.lower())
    return candidate
