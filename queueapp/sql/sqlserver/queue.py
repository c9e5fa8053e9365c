"""SQL Server 2017 and later, and Azure SQL: the statements of a queue's table.

They run on Django's own cursor, so in the caller's transaction (``session``). One shape takes messages: an
ordered ``TOP (n)`` under ``UPDLOCK, READPAST, ROWLOCK``, updated or deleted with OUTPUT. Keys come as one JSON
array, so a statement has one text and one plan whatever the batch. What looks after leases
is in ``upkeep``, what is no queue in ``backend``.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from ...messages.ids import as_uuid
from ..base import QueueSql
from ..claims import Claimed, PeekResult, SeqRange
from ..message_columns import COUNTS, REST, WHOLE, Outgoing, Row, Run
from ..tables import QueueTable, StoreTable
from .arriving import SqlServerArriving
from .bookmarks import SqlServerBookmarks
from .bound import SqlServerBound
from .claims import Claims
from .copying import SqlServerCopying
from .errors import LockTimeout
from .flowing import SqlServerFlowing
from .holding import SqlServerHolding, held
from .inserting import insert_rows, insert_statement
from .keys import SqlServerWaiting
from .locking import KEYS, LOOKING, MAX_BATCH, TAKING
from .ranked import RankedClaims
from .results import SqlServerResults
from .rows import LITERALS, Returned
from .scaling import SqlServerScaling
from .selecting import SqlServerSelecting
from .session import LATER, execute, fetch, fetch_within, json_of, later_params, quote, quote_table, translated

#: An identity may have been seeded below zero.
_BEFORE_ALL = -(2**63)


class SqlServerQueueSql(
    SqlServerFlowing,
    SqlServerArriving,
    SqlServerBookmarks,
    SqlServerScaling,
    SqlServerHolding,
    SqlServerResults,
    SqlServerCopying,
    SqlServerBound,
    SqlServerWaiting,
    SqlServerSelecting,
    QueueSql,
):
    """The statements of one queue on SQL Server, written once when the queue is first used."""

    def __init__(self, table: QueueTable) -> None:
        super().__init__(table)
        self._q = quote_table(table.db_table)
        self._c = c = {name: quote(column) for name, column in table.columns.items()}
        self._claims = claims = (RankedClaims if table.priority64 else Claims)(table, self._q, c)
        if table.has("lease_token", "lease_owner", "lease_expires", "deliveries"):
            # The count is unqualified: ``m.deliveries + 1`` is refused by some servers.
            lease = (
                f" SET {c['lease_token']} = %s, {c['lease_owner']} = %s, {c['lease_expires']} = {LATER}, "
                f"{c['deliveries']} = {c['deliveries']} + 1"
            )
            self._by_lease = claims.claim("UPDATE", lease, "inserted", Returned(c, table.claimed))
        # The row locks are kept until the caller's transaction ends, which is the ownership.
        self._by_delete = claims.claim("DELETE", "", "deleted", Returned(c, table.claimed))
        self._whole = claims.claim("DELETE", "", "deleted", Returned(c, (*table.claimed, *REST)))
        self._row = Returned(c, Row._fields)
        # What the table has no default for (``Recoverable``, which always holds 1 in NServiceBus' tables), or one for others.
        self._filled = [(c[name], LITERALS[value]) for name, value in table.filled.items()]
        self._inserts: dict[tuple[bool, ...], str] = {}
        self._prepare_flow()

    # -- putting in -----------------------------------------------------------------------------------------------

    def insert(self, connection: Any, message: Outgoing) -> None:
        with translated(connection, self.table.db_table):
            execute(connection, *insert_statement(self._q, self._c, self._filled, self._inserts, message))

    def insert_runs(self, connection: Any, runs: Iterable[Run], undisturbed: bool = False) -> int:
        # Each piece is one statement, drawn before it is sent, so it makes no difference who uses the connection meanwhile.
        with translated(connection, self.table.db_table):
            return insert_rows(connection, self._q, self._c, self._filled, runs, self.table.priority64)

    # -- taking out -----------------------------------------------------------------------------------------------

    def peek(
        self,
        connection: Any,
        ahead: Sequence[SeqRange],
        behind: Sequence[SeqRange],
        limit: int,
    ) -> PeekResult:
        return self._claims.peek(connection, ahead, behind, limit)

    def read_heads(self, connection: Any, only: SeqRange, limit: int) -> list[tuple[int, str]]:
        return self._claims.read_heads(connection, only, limit)

    def read_heads_and_bodies(self, connection: Any, only: SeqRange, limit: int) -> list[tuple[int, str, bytes | None]]:
        return self._claims.read_heads(connection, only, limit, bodies=True)

    def claim_by_lease(
        self,
        connection: Any,
        ranges: Sequence[SeqRange],
        limit: int,
        token: uuid.UUID,
        owner: uuid.UUID,
        lease_ms: int,
    ) -> list[Claimed]:
        values = (token, owner, *later_params(lease_ms))
        return self._claims.take(connection, self._by_lease, values, ranges, limit)

    def claim_by_delete(
        self,
        connection: Any,
        ranges: Sequence[SeqRange],
        limit: int,
        whole: bool = False,
        owner: uuid.UUID | None = None,
    ) -> list[Claimed]:
        return self._claims.take(connection, self._whole if whole else self._by_delete, (), ranges, limit)

    def look_through(self, connection: Any, low: int, high: int, before: int, limit: int) -> tuple[list[int], int, int]:
        return self._claims.look_through(connection, low, high, before, limit)

    # -- ending a lease -------------------------------------------------------------------------------------------

    def _leased(self) -> str:
        # Index: the primary key, one seek a key (KEYS). Safe: the token fences, a stale one touches nothing; keys come
        # ascending and are sought in that order, so two enders never lock rows in opposite orders.
        c = self._c
        return f"{KEYS} {self._q} AS q WITH (ROWLOCK) ON q.{c['seq']} = k.[key] WHERE q.{c['lease_token']} = %s"

    def _unlease(self) -> str:
        c = self._c
        return f"SET {c['lease_token']} = NULL, {c['lease_owner']} = NULL, {c['lease_expires']} = NULL"

    def ack(self, connection: Any, seqs: Sequence[int], token: uuid.UUID) -> int:
        return execute(connection, f"DELETE q {self._leased()}", (json_of(list(seqs)), token))

    def give_back(self, connection: Any, seqs: Sequence[int], token: uuid.UUID, *, handled: bool) -> int:
        c = self._c
        counts = f"{c['cancels']} = {c['cancels']} + 1" if handled else f"{c['deliveries']} = {c['deliveries']} - 1"
        # The message keeps its seq, so its old place.
        sql = f"UPDATE q {self._unlease()}, {counts} {self._leased()}"
        return execute(connection, sql, (json_of(list(seqs)), token))

    def extend(self, connection: Any, seqs: Sequence[int], token: uuid.UUID, lease_ms: int) -> list[int]:
        c = self._c
        # A lease that lapsed but was not taken yet is still ours, but where leases are counted.
        sql = f"UPDATE q SET {c['lease_expires']} = {LATER} OUTPUT inserted.{c['seq']} {self._leased()}{self._alive()}"
        params = (*later_params(lease_ms), json_of(list(seqs)), token)
        return sorted(seq for (seq,) in fetch(connection, sql, params))

    def write_headers(self, connection: Any, seq: int, token: uuid.UUID, headers: str) -> int:
        c = self._c
        # Index: the primary key. Safe: fenced by the token, so what a stale handler writes beside it is refused with it.
        sql = f"UPDATE {self._q} SET {c['headers']} = %s WHERE {c['seq']} = %s AND {c['lease_token']} = %s"
        return execute(connection, sql, (headers, seq, token))

    # -- after a failure ------------------------------------------------------------------------------------------

    def lock(self, connection: Any, seq: int, token: uuid.UUID | None, wait_ms: int) -> Row | None:
        fence = f" AND q.{self._c['lease_token']} = %s" if token else ""
        # Index: the primary key. Safe: the waiter queues on the row's lock, so a claim with READPAST cannot overtake
        # it; the failed attempt is always counted, however many workers want the message.
        sql = f"{self._locking()} WHERE q.{self._c['seq']} = %s{fence}"
        return self._as_row(fetch_within(connection, max(1, wait_ms), sql, (seq, token) if token else (seq,)))

    def lock_again(self, connection: Any, seq: int, wait_ms: int) -> Row | None:
        # Index: the primary key. Safe: one batch, so the server does not wait for us between the rollback and the lock.
        # No parameters, because a batch with parameters may not change how many transactions are open; nothing but two
        # integers is written into the text.
        connection.needs_rollback = False  # this is the rollback; Django's cursor would refuse to run it
        return self._as_row(
            fetch_within(
                connection,
                max(1, wait_ms),
                f"{self._locking()} WHERE q.{self._c['seq']} = {int(seq)}",
                (),
                first="IF @@TRANCOUNT > 0 ROLLBACK TRANSACTION; BEGIN TRANSACTION; ",
            )
        )

    def _locking(self) -> str:
        return f"SELECT {self._row.of('q')} FROM {self._q} AS q WITH (UPDLOCK, ROWLOCK)"

    def _as_row(self, rows: list[Any]) -> Row | None:
        found = self._row.tuples(rows)
        return Row(*found[0])._replace(id=uuid.UUID(bytes=found[0][1])) if found else None

    def put_back(
        self,
        connection: Any,
        seq: int,
        *,
        deliveries: int,
        cancels: int,
        failures: str | None,
        token: uuid.UUID | None = None,
        headers: str | None = None,
    ) -> int:
        c = self._c
        texts = {"headers": headers, "failures": failures}
        values: dict[str, Any] = {"deliveries": deliveries, "cancels": cancels}
        values |= {name: text for name, text in texts.items() if text is not None}
        given = {name: value for name, value in values.items() if name in c}
        nulls = [
            name for name in ("lease_token", "lease_owner", "lease_expires", "failures") if name in c.keys() - given
        ]
        fence = f" AND {c['lease_token']} = %s" if token else ""
        # Index: the primary key. Safe: the caller holds the row's lock from ``lock``.
        setting = [*(f"{c[name]} = NULL" for name in nulls), *(f"{c[name]} = %s" for name in given)]
        sql = f"UPDATE {self._q} SET {', '.join(setting)} WHERE {c['seq']} = %s{fence}"
        return execute(connection, sql, (*given.values(), seq, *((token,) if token else ())))

    def remove(self, connection: Any, seqs: Sequence[int]) -> int:
        # Index: the primary key, one seek a key (KEYS). Safe: the caller holds the locks, or means it.
        sql = f"DELETE q {KEYS} {self._q} AS q WITH (ROWLOCK) ON q.{self._c['seq']} = k.[key]"
        return execute(connection, sql, (json_of(list(seqs)),))

    # -- housekeeping ---------------------------------------------------------------------------------------------

    def _looked_for(self, condition: str) -> str:
        # Index: the primary key, after the key that is the last parameter. Safe: LOOKING; found here, taken by ``_take_keys``.
        return (
            f"SELECT TOP (%s) q.{self._c['seq']} FROM {self._q} AS q WITH ({LOOKING}) "
            f"WHERE {condition} AND q.{self._c['seq']} > %s ORDER BY q.{self._c['seq']}"
        )

    def _by_key(self, condition: str) -> str:
        # Index: the primary key, one seek a key (KEYS). Safe: TAKING, asking again under the lock; nothing else is locked,
        # whatever lies between the keys, so ``MAX_BATCH`` bounds the locks and no statement locks the table.
        return f"{KEYS} {self._q} AS q WITH ({TAKING}) ON q.{self._c['seq']} = k.[key] WHERE {condition}"

    def _take_keys(self, connection: Any, look: str, take: str, limit: int, of_condition: Sequence[Any]) -> int:
        """Take what a look finds, in pieces, each after the last key of the one before: a piece of which others were quicker
        is not the end."""
        done, after = 0, _BEFORE_ALL
        while done < limit:
            size = min(limit - done, MAX_BATCH)
            keys = [seq for (seq,) in fetch(connection, look, (size, *of_condition, after))]
            if keys:
                done += execute(connection, take, (json_of(keys), *of_condition))
                after = keys[-1]
            if len(keys) < size:
                break
        return done

    def purge_expired(self, connection: Any, limit: int) -> list[uuid.UUID]:
        return [as_uuid(one) for (one,) in self._purge_expired(connection, limit, f"deleted.{self._c['id']}")]

    def take_expired(self, connection: Any, limit: int) -> list[Row]:
        return self._rows_of(self._purge_expired(connection, limit, self._row.of("deleted")))

    def _purge_expired(self, connection: Any, limit: int, returned: str) -> list[Any]:
        if not self.table.has("expires"):
            return []
        expires, expiry = f"q.{self._c['expires']}", self.table.expiry
        looks = (
            [("expires", f"{expires} IS NOT NULL AND {expires} <= SYSUTCDATETIME()")]
            if expiry is None
            else expiry.found_by(self._claims.expiry_terms())
        )
        gone: list[Any] = []
        for by, over in looks:
            # A leased message may still be acked: it is not touched before its lease is over, unless the queue says otherwise.
            expired = over if self.table.expire_leased else f"{over} AND {self._claims.unleased()}"
            # Index: the filtered one on expires, or the one on enqueued_at. Safe: LOOKING.
            look = (
                f"SELECT TOP (%s) q.{self._c['seq']} FROM {self._q} AS q WITH ({LOOKING}) "
                f"WHERE {expired} ORDER BY q.{self._c[by]}"
            )
            # TAKING waits for no lock in either index, so it cannot deadlock with a receiver (NServiceBus #308).
            take = f"DELETE q OUTPUT {returned} {self._by_key(expired)}"
            while len(gone) < limit:
                size = min(limit - len(gone), MAX_BATCH)
                keys = sorted(seq for (seq,) in fetch(connection, look, (size,)))
                some = fetch(connection, take, (json_of(keys),)) if keys else []
                gone += some
                if len(keys) < size or not some:
                    break
        return gone

    def purge(self, connection: Any, limit: int) -> int:
        unleased = self._claims.unleased()
        if self.table.has_unevaluated:
            unleased = f"({unleased} OR {held(self._c)})"
        return self._take_keys(connection, self._looked_for(unleased), f"DELETE q {self._by_key(unleased)}", limit, ())

    def release_owner(self, connection: Any, owner: uuid.UUID, limit: int, *, started: bool = True) -> int:
        c = self._c
        # What was shared out and never taken up was not counted.
        counted = "1" if self.table.lease_index is None else f"IIF({c['lease_token']} = {c['lease_owner']}, 0, 1)"
        uncount = "" if started else f", {c['deliveries']} = {c['deliveries']} - {counted}"
        # The look scans the primary key, once per dead subscriber, by the housekeeping process. A row
        # that somebody else took in between is not the dead one's any more.
        owned = f"q.{c['lease_owner']} = %s"
        take = f"UPDATE q {self._unlease()}{uncount} {self._by_key(owned)}"
        return self._take_keys(connection, self._looked_for(owned), take, limit, (owner,))

    def clamp_priorities(self, connection: Any, recipients: Sequence[str], limit: int) -> dict[int, int]:
        return self._claims.clamp(connection, recipients, limit)

    def is_empty(self, connection: Any) -> bool:
        # Index: the primary key, first entry. Safe: it waits for nobody; a row that is locked is a row that is there.
        try:
            return not fetch_within(connection, 0, f"SELECT TOP (1) 1 FROM {self._q} AS q WITH (READCOMMITTEDLOCK)", ())
        except LockTimeout:
            return False

    # -- between tables -------------------------------------------------------------------------------------------

    def insert_row(self, connection: Any, row: Row, *, same_queue: bool = False) -> None:
        row = self.table.within_levels(row)
        names = Row._fields if same_queue else self.table.moved(Row._fields)
        given = {name: getattr(row, name) for name in names if name in self._c}
        given = {name: value for name, value in given.items() if value is not None}
        given.pop("seq")
        # A bit stands in the text: see ``session``.
        pairs = [(self._c[name], str(int(value)) if isinstance(value, bool) else "%s") for name, value in given.items()]
        pairs += self._filled
        params = [value for value in given.values() if not isinstance(value, bool)]
        # Index: none is read. Safe: one row in the caller's transaction.
        sql = (
            f"INSERT INTO {self._q} ({', '.join(column for column, _ in pairs)}) "
            f"VALUES ({', '.join(value for _, value in pairs)})"
        )
        with translated(connection, self.table.db_table):
            execute(connection, sql, params)

    def insert_from(
        self, connection: Any, source: StoreTable, keys: Sequence[int], *, reset_counts: bool = False
    ) -> int:
        names = self.table.moved(name for name in (*WHOLE, *(() if reset_counts else COUNTS)) if self.table.has(name))
        pairs = [(self._c["id"], f"q.{quote(source.columns['message_id'])}")]
        pairs += [(self._c[name], f"q.{quote(source.columns[name])}") for name in names] + self._filled
        params: tuple[Any, ...] = (json_of(list(keys)),)
        if highest := max(0, self.table.levels - 1):
            place = 1 + names.index("priority")
            column, value = pairs[place]
            pairs[place] = column, f"CASE WHEN {value} < 0 THEN 0 WHEN {value} > %s THEN %s ELSE {value} END"
            params = (highest, highest, *params)
        # Index: the primary key of the source, one seek a key (KEYS). Safe: the caller holds the locks of its rows and
        # deletes them in the same transaction; identity numbers follow the ORDER BY.
        sql = (
            f"INSERT INTO {self._q} ({', '.join(column for column, _ in pairs)}) "
            f"SELECT {', '.join(value for _, value in pairs)} {KEYS} {quote_table(source.db_table)} AS q "
            f"ON q.{quote(source.key)} = k.[key] ORDER BY q.{quote(source.order)}, q.{quote(source.key)}"
        )
        with translated(connection, self.table.db_table):
            return execute(connection, sql, params)
