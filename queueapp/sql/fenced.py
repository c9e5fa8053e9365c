"""What comes into a queue with barriers in bulk, or from another table: under the lock of a send, as one that is sent alone."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from .base import QueueSql
from .inserts import Source
from .message_columns import Outgoing, Row, Run
from .tables import StoreTable


class FencedInserts(QueueSql):
    """Stands before the verbs of a database, which ``super()`` is: they put in what this has locked for."""

    def insert_runs(self, connection: Any, runs: Iterable[Run], undisturbed: bool = False) -> int:
        drawn = iter(runs)
        first = next(drawn, None)
        if first is None:
            return 0
        # An expression may find one among any of them; a lock that is held shared by two cannot become exclusive.
        self.fence(connection, exclusive=self.table.finds_barriers or first.like.is_barrier)
        return super().insert_runs(connection, itertools.chain([first], drawn), undisturbed)  # type: ignore[safe-super]

    def insert_row(self, connection: Any, row: Row, *, same_queue: bool = False) -> None:
        self.fence(connection, exclusive=bool(row.is_barrier))
        super().insert_row(connection, row, same_queue=same_queue)  # type: ignore[safe-super]

    def insert_rows(self, connection: Any, rows: Sequence[Row]) -> int:
        self.fence(connection, exclusive=self.table.finds_barriers or any(row.is_barrier for row in rows))
        return super().insert_rows(connection, rows)  # type: ignore[safe-super]

    def insert_from(
        self, connection: Any, source: StoreTable, keys: Sequence[int], *, reset_counts: bool = False
    ) -> int:
        self.fence(connection, exclusive=self.holds_barrier(connection, source, keys))
        return super().insert_from(connection, source, keys, reset_counts=reset_counts)  # type: ignore[safe-super]

    def insert_select(self, connection: Any, like: Outgoing, source: Source, columns: Sequence[tuple[str, int]]) -> int:
        self.fence(connection, exclusive=self.table.finds_barriers or like.is_barrier)
        return super().insert_select(connection, like, source, columns)  # type: ignore[safe-super]

    def insert_copies(
        self, connection: Any, message: Outgoing, recipients: Sequence[str], subscriptions: str, mark: int
    ) -> int:
        self.fence(connection, exclusive=message.is_barrier)
        return super().insert_copies(connection, message, recipients, subscriptions, mark)  # type: ignore[safe-super]

    def replace_by_copies(
        self,
        connection: Any,
        seqs: Sequence[int],
        recipients: Sequence[str],
        token: uuid.UUID | None = None,
        recipient: str = "",
    ) -> int:
        # A barrier for a consumer that is no more is a barrier for another one.
        self.fence(connection, exclusive=bool(recipient))
        return super().replace_by_copies(connection, seqs, recipients, token, recipient)  # type: ignore[safe-super]
