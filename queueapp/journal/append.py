"""Appends published messages to the journal: one row in the publisher's transaction, whichever queues take the
message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from django.db import Error, connections

from .. import notifier
from ..errors import NotMigrated
from ..models import JournalEntry
from ..sql import ErrorKind, backend_of
from ..sql.journal import JournalSql
from ..sql.message_columns import Outgoing
from .topics import is_journaled


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
        some = [queue._meta.label for queue in self.took]
        some += ["+" + queue._meta.label for queue in self.fed]
        some += ["-" + queue._meta.label for queue in self.refused]
        return f"|{'|'.join(some)}|" if some else ""


class Journal:
    """The recorder of ``topics.publisher``."""

    def keeps(self, topic: str) -> bool:
        """Whether the topic is journaled. Runs no query."""
        return is_journaled(topic)

    def record(self, alias: str, topic: str, published: Sequence[Outgoing], taken: Sequence[Distribution]) -> None:
        """Append the messages; ``taken`` has the queues of each. One statement in the publisher's transaction."""
        connection = connections[alias]
        marks = {one: one.marks for one in set(taken)}
        try:
            journal_of(connection).keep(connection, topic, published, [marks[one] for one in taken])
        except Error as error:
            if backend_of(connection).error_kind(error) is ErrorKind.MISSING:
                raise NotMigrated(alias, [f"{JournalEntry._meta.db_table} or a column of it"]) from error
            raise
        if any(one.fed for one in marks):
            notifier.journaled(connection)
