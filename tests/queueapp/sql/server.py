"""What a test of the SQL layer works with: one database, messages to put in, and further connections to it."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from time import monotonic
from typing import Any

from django.db import connections

from queueapp.messages import new_id
from queueapp.sql import QueueSql, backend_of, queue_sql
from queueapp.sql.base import Backend
from queueapp.sql.claims import MAX_SEQ, SEQ, Claimed, SeqRange
from queueapp.sql.message_columns import Outgoing, Row
from queueapp.sql.tables import QueueTable
from tests.in_process_worker import eventually

ALL = (SeqRange(),)
#: What must not wait for a lock is done in this many seconds, on the slowest machine.
AT_ONCE = 5.0


def outgoing(body: bytes | None = b"{}", headers: str = "{}", **options: Any) -> Outgoing:
    """A message about to be stored, with an id of its own."""
    return Outgoing(options.pop("id", None) or new_id(), headers, body, **options)


def levels(
    priorities: int = 1, recipients: tuple[str, ...] = ("",), low: int = 0, high: int = MAX_SEQ
) -> list[SeqRange]:
    """Ranges of every recipient and level in claim order, the highest first."""
    return [SeqRange(low, high, who, level) for level in reversed(range(priorities)) for who in recipients]


class Server:
    """One database under test."""

    def __init__(self, alias: str) -> None:
        self.alias = alias
        self.connection: Any = connections[alias]
        self.vendor: str = self.connection.vendor
        self.backend: Backend = backend_of(self.connection)
        self._other_connections: list[Any] = []

    def another(self) -> Any:
        """A second connection: another process, as far as the database knows."""
        second_connection = self.connection.copy()
        second_connection.inc_thread_sharing()
        self._other_connections.append(second_connection)
        return second_connection

    def close(self) -> None:
        for second in self._other_connections:
            second.close()

    @contextmanager
    def transaction(self, connection: Any) -> Iterator[None]:
        """An open transaction on a connection that Django's registry does not know."""
        connection.set_autocommit(False)
        try:
            yield
            connection.commit()
        except BaseException:
            connection.rollback()
            raise
        finally:
            connection.set_autocommit(True)

    @contextmanager
    def rolled_back(self, connection: Any) -> Iterator[None]:
        """An open transaction that is rolled back at the end."""
        connection.set_autocommit(False)
        try:
            yield
        finally:
            connection.rollback()
            connection.set_autocommit(True)

    # -- messages -----------------------------------------------------------------------------------------------------

    def sql(self, queue: Any) -> QueueSql:
        return queue_sql(queue, self.connection)

    def put(self, queue: Any, count: int = 1, **options: Any) -> list[int]:
        """Put messages in; returns their seqs, which ascend in the order of sending."""
        before = self.seqs(queue)
        for _ in range(count):
            self.sql(queue).inserts.insert(self.connection, outgoing(**options))
        return self.seqs(queue)[len(before) :]

    def seqs(self, queue: Any) -> list[int]:
        """Every seq in the table, by a plain read."""
        return list(queue.objects.using(self.alias).order_by("seq").values_list("seq", flat=True))

    def row(self, queue: Any, seq: int) -> Any:
        """A message as the ORM sees it."""
        return queue.objects.using(self.alias).get(seq=seq)

    def rows(self, queue: Any) -> list[Any]:
        return list(queue.objects.using(self.alias).order_by("seq"))

    def lease(
        self, queue: Any, limit: int = 100, *, ranges: Any = ALL, lease_ms: int = 60_000, **options: Any
    ) -> tuple[uuid.UUID, list[int]]:
        """Lease messages; returns the token and the seqs."""
        token = uuid.uuid4()
        owner = options.pop("owner", None) or uuid.uuid4()
        rows = self.sql(queue).claims.claim_by_lease(self.connection, ranges, limit, token, owner, lease_ms, **options)
        return token, [row[SEQ] for row in rows]

    def passed(self, time: Callable[[], datetime]) -> None:
        """Wait until the database's clock has passed a time."""
        eventually(lambda: self.backend.now(self.connection) > time())

    # -- anything else ------------------------------------------------------------------------------------------------

    def run(self, sql: str, *params: Any) -> list[Any]:
        """A statement of the test's own; its rows, if it has any."""
        with self.connection.cursor() as cursor:
            cursor.execute(sql, params or None)
            return list(cursor.fetchall()) if cursor.description else []

    def kind_of(self, error: BaseException) -> str:
        return self.backend.error_kind(error).value


def seqs_of(rows: list[Claimed]) -> list[int]:
    """The seqs of claimed messages, in the order they came."""
    return [row[SEQ] for row in rows]


def whole(queue: Any, claimed: Claimed) -> Row:
    """A message that was claimed with ``whole=True``."""
    return QueueTable.of(queue).row_of(claimed)


@contextmanager
def within(seconds: float = AT_ONCE) -> Iterator[None]:
    """Fail when the block takes longer: it waited for a lock that it must not wait for."""
    started = monotonic()
    yield
    taken = monotonic() - started
    assert taken < seconds, f"took {taken:.1f} s: it waited"
