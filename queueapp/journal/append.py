"""Appends published messages to the journal: one row in the publisher's transaction, whichever queues take the message.

Which topics are journaled, and for how long: ``QUEUEAPP["JOURNAL"]``, read once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import lru_cache
from typing import Any, NamedTuple

from django.core.signals import setting_changed
from django.db import Error, connections

from .. import notifier
from ..conf import settings
from ..errors import NotMigrated
from ..models import JournalEntry
from ..models.delivery.topics import is_pattern
from ..sql import ErrorKind, backend_of
from ..sql.journal import JournalSql
from ..sql.message_columns import Outgoing


def journal_of(connection: Any) -> JournalSql:
    """The statements of a database's journal."""
    return backend_of(connection).journal(JournalEntry._meta.db_table)


def is_fed(queue: Any) -> bool:
    """Whether a queue gets messages of journaled topics from the journal, up to its target depth, and not from
    publishers."""
    return queue.delivery.target_queue_depth is not None


#: Marks in ``JournalEntry.queues``: the queue took the message; its filter refused it; it gets it from the journal.
TOOK, REFUSED, FED = "|{}|", "|-{}|", "|+{}|"


class Distribution(NamedTuple):
    """The queues of a published message: those that take it, those that get it from the journal, and those whose filter
    refuses it."""

    took: tuple[Any, ...] = ()
    fed: tuple[Any, ...] = ()
    refused: tuple[Any, ...] = ()

    @property
    def marks(self) -> str:
        """The text for ``JournalEntry.queues``."""
        labels = [queue._meta.label for queue in self.took]
        labels += ["+" + queue._meta.label for queue in self.fed]
        labels += ["-" + queue._meta.label for queue in self.refused]
        return f"|{'|'.join(labels)}|" if labels else ""


class Journal:
    """The recorder of ``topics.publisher``."""

    def keeps(self, topic: str) -> bool:
        """Whether the topic is journaled. Runs no query."""
        return is_journaled(topic)

    def record(self, alias: str, topic: str, published: Sequence[Outgoing], taken: Sequence[Distribution]) -> None:
        """Append the messages; ``taken`` has the queues of each. One statement in the publisher's transaction."""
        connection = connections[alias]
        marks = {queue: queue.marks for queue in set(taken)}
        try:
            journal_of(connection).keep(connection, topic, published, [marks[queue] for queue in taken])
        except Error as error:
            if backend_of(connection).error_kind(error) is ErrorKind.MISSING:
                raise NotMigrated(alias, [f"{JournalEntry._meta.db_table} or a column of it"]) from error
            raise
        if any(mark.fed for mark in marks):
            notifier.journaled(connection)


#: Topics whose result is cached. Publishers may use any names, so not all are.
_KEPT = 4096


def finder(text: str) -> Callable[[str], Any]:
    """A function that returns whether a topic matches this name or regular expression. Raises ``re.error``."""
    return re.compile(text).search if is_pattern(text) else text.__eq__


def among(topics: Iterable[str], text: str) -> list[str]:
    """The topics that match a name or regular expression."""
    return list(filter(finder(text), topics))


@lru_cache(maxsize=1)
def _declared() -> tuple[tuple[Callable[[str], Any], timedelta | None], ...]:
    return tuple((finder(text), kept) for text, kept in settings.JOURNAL.items())


@lru_cache(maxsize=_KEPT)
def _place(topic: str) -> int:
    """The index of the declaration that a topic matches; -1: none."""
    return next((n for n, (found, _) in enumerate(_declared()) if found(topic)), -1)


def is_journaled(topic: str) -> bool:
    """Whether messages published to this topic are journaled."""
    return _place(topic) >= 0


def retention_of(topic: str) -> timedelta | None:
    """How long its entries are kept; None: for ever, as those of a topic that is not declared any more."""
    place = _place(topic)
    return _declared()[place][1] if place >= 0 else None


def _forget(*, setting: str, **_: Any) -> None:
    if setting == "QUEUEAPP":
        _declared.cache_clear()
        _place.cache_clear()


setting_changed.connect(_forget, dispatch_uid="queueapp.journal")
