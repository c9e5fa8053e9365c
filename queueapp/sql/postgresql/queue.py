"""PostgreSQL 14 to 18: the statements of a queue's table.

They run on Django's own connection beneath its cursor wrapper: prepared and binary, 1.5 to 3 times the wrapper for
single rows, and in the caller's transaction. Peek and claims are in ``claims``, what looks after leases in ``upkeep``,
what is not of one queue in ``backend``.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from typing import Any

import psycopg

from ...errors import TableNotFound
from ...messages.ids import as_uuid
from ...registry import queues
from ..claims import MAX_SEQ
from ..message_columns import BY_NAME, COUNTS, NO_OPTIONS, OPTIONS, WHOLE, Kind, Outgoing, Row, Run, kind_of
from ..tables import QueueTable, StoreTable
from .arriving import PostgresqlArriving
from .bookmarks import PostgresqlBookmarks
from .bound import PostgresqlBound
from .copying import PostgresqlCopying
from .flowing import PostgresqlFlowing
from .holding import PostgresqlHolding, held
from .inserting import copy_runs
from .keys import PostgresqlWaiting
from .packed import BYTES, PACKED, TEXT, UUID, PackedStatement, ready
from .results import PostgresqlResults
from .rows import LITERALS, to_utc
from .scaling import PostgresqlScaling
from .selecting import PostgresqlSelecting
from .session import execute, fetch, quote, quote_table, translated
from .upkeep import PostgresqlUpkeep

_SMALLINT = -(2**15), 2**15 - 1


class PostgresqlQueueSql(
    PostgresqlUpkeep,
    PostgresqlArriving,
    PostgresqlBookmarks,
    PostgresqlHolding,
    PostgresqlResults,
    PostgresqlBound,
    PostgresqlScaling,
    PostgresqlFlowing,
    PostgresqlCopying,
    PostgresqlWaiting,
    PostgresqlSelecting,
):
    """The statements of one queue on PostgreSQL, written once when the queue is first used."""

    def __init__(self, table: QueueTable) -> None:
        super().__init__(table)
        self._filled = {name: LITERALS[value] for name, value in table.filled.items()}
        self._optional = tuple(name in self._c for name in OPTIONS)
        self._inserts: dict[tuple[str, ...], str] = {}
        #: Options that the table has columns for, by their places; and the packed statement of each combination.
        self._places = tuple(place for place, has in enumerate(self._optional) if has)
        self._packed_inserts: dict[tuple[int, ...], tuple[PackedStatement, Any]] = {}
        self._plain_insert = PackedStatement(self._insert_into((), ("%s", "%s", "%s")), (UUID, TEXT, BYTES))

    # -- putting in -----------------------------------------------------------------------------------------------

    def insert(self, connection: Any, message: Outgoing) -> None:
        try:
            if self.table.barriers:
                execute(connection, *self._insert_fenced(message))
            elif ready(connection):
                if message[3:] == NO_OPTIONS:
                    self._plain_insert.execute(connection, [message[0].bytes, message[1].encode(), message[2]])
                else:
                    self._insert_packed(connection, message)
            else:
                execute(connection, *self._insert_of(message))
        except Exception as error:
            if isinstance(error.__cause__, psycopg.errors.UndefinedTable):
                table = self.table.db_table
                raise TableNotFound(table, connection.alias, foreign=queues.is_foreign(table)) from error
            raise

    def _insert_of(self, message: Outgoing) -> tuple[str, tuple[Any, ...]]:
        """Only the columns that differ from their defaults: one statement text per combination, each prepared. What a
        foreign table has no column for is in the headers."""
        wanted = zip(OPTIONS, message[3:], NO_OPTIONS, self._optional, strict=True)
        used = tuple((name, value) for name, value, default, has in wanted if value != default and has)
        names = tuple(name for name, _ in used)
        sql = self._inserts.get(names)
        if sql is None:
            # The expiry is computed with the database's clock, so that a sender's clock cannot drop a message early.
            later = f"{self._clock} + %s * interval '1 ms'"
            values = [later if BY_NAME[name].kind is Kind.TIME else "%s" for name in names]
            sql = self._inserts[names] = self._insert_into(names, ["%s", "%s", "%s", *values])
        return sql, (*message[:3], *(value for _, value in used))

    def _insert_packed(self, connection: Any, message: Outgoing) -> None:
        """The same, packed: half of what a cursor costs."""
        said = tuple(place for place in self._places if message[3 + place] != NO_OPTIONS[place])
        found = self._packed_inserts.get(said)
        if found is None:
            found = self._packed_inserts[said] = self._packed_insert(said)
        statement, packers = found
        values = [pack(message[3 + place]) for place, pack in packers]
        statement.execute(connection, [message[0].bytes, message[1].encode(), message[2], *values])

    def _packed_insert(self, said: tuple[int, ...]) -> tuple[PackedStatement, Any]:
        names = [OPTIONS[place] for place in said]
        kinds = [kind_of(BY_NAME[name], priority64=self.table.priority64) for name in names]
        values = [f"{self._clock} + %s * interval '1 ms'" if kind is Kind.TIME else "%s" for kind in kinds]
        sql = self._insert_into(names, ["%s", "%s", "%s", *values])
        types = [PACKED[kind][0] for kind in kinds]
        packers = tuple((place, PACKED[kind][1]) for place, kind in zip(said, kinds, strict=True))
        return PackedStatement(sql, (UUID, TEXT, BYTES, *types)), packers

    def _insert_fenced(self, message: Outgoing) -> tuple[str, tuple[Any, ...]]:
        raise NotImplementedError  # of ``fenced``

    def _insert_into(self, optional: Sequence[str], values: Sequence[str]) -> str:
        columns = [self._c[name] for name in ("id", "headers", "body", *optional, *self._filled)]
        values = [*values, *self._filled.values()]
        # No index beyond those of the table; safe: one row, the caller's transaction.
        return f"INSERT INTO {self._q} ({', '.join(columns)}) VALUES ({', '.join(values)})"

    def insert_runs(self, connection: Any, runs: Iterable[Run], undisturbed: bool = False) -> int:
        # COPY, rows packed here: 268,000 rows a second where executemany makes 132,000. In the caller's transaction.
        with translated(connection, self.table.db_table):
            return copy_runs(connection, self._q, self._c, runs, self.table.filled, undisturbed, self.table.priority64)

    # -- ending a lease -------------------------------------------------------------------------------------------

    def ack(self, connection: Any, seqs: Sequence[int], token: uuid.UUID) -> int:
        # Primary key; the token fences: a stale ack deletes nothing.
        sql = f"DELETE FROM {self._q} WHERE {self._fenced} AND {self._c['seq']} = ANY(%s)"
        return self._in_order.execute_by_key(connection, sql, (token, list(seqs)))

    def give_back(self, connection: Any, seqs: Sequence[int], token: uuid.UUID, *, handled: bool) -> int:
        c = self._c
        counts = f"{c['cancels']} = {c['cancels']} + 1" if handled else f"{c['deliveries']} = {c['deliveries']} - 1"
        # Primary key, fenced by the token. The message keeps its seq, so its old place.
        sql = (
            f"UPDATE {self._q} SET {c['lease_token']} = NULL, {c['lease_owner']} = NULL, {c['lease_expires']} = NULL, "
            f"{counts} WHERE {self._fenced} AND {c['seq']} = ANY(%s)"
        )
        return self._in_order.execute_by_key(connection, sql, (token, list(seqs)))

    def extend(self, connection: Any, seqs: Sequence[int], token: uuid.UUID, lease_ms: int) -> list[int]:
        c = self._c
        # Primary key, fenced by the token. A lease that lapsed but was not taken yet is still ours, but where leases are counted.
        sql = (
            f"UPDATE {self._q} SET {c['lease_expires']} = clock_timestamp() + %s * interval '1 ms' "
            f"WHERE {self._fenced} AND {c['seq']} = ANY(%s){self._alive} RETURNING {c['seq']}"
        )
        return [row[0] for row in self._in_order.fetch_by_key(connection, sql, (lease_ms, token, list(seqs)))]

    def write_headers(self, connection: Any, seq: int, token: uuid.UUID, headers: str) -> int:
        # Primary key, fenced by the token: what a stale handler writes beside it in its transaction is refused with it. No index
        # holds headers, so the update is HOT where the page has room.
        sql = f"UPDATE {self._q} SET {self._c['headers']} = %s WHERE {self._fenced} AND {self._c['seq']} = %s"
        return self._in_order.execute_by_key(connection, sql, (headers, token, seq))

    # -- after a failure ------------------------------------------------------------------------------------------

    def lock(self, connection: Any, seq: int, token: uuid.UUID | None, wait_ms: int) -> Row | None:
        # Primary key. The waiter queues on the row's lock, so a claim with SKIP LOCKED cannot overtake it: the failed
        # attempt is always counted, however many workers want the message.
        # The transaction may be the user's, and with it a timeout of his own: it is put back.
        set_timeout = "SELECT current_setting('lock_timeout'), set_config('lock_timeout', %s, true)"
        before = fetch(connection, set_timeout, (f"{max(1, wait_ms)}ms",))[0][0]
        fence = f" AND {self._c['lease_token']} = %s" if token else ""
        sql = f"SELECT {self._read(Row._fields)} FROM {self._q} WHERE {self._c['seq']} = %s{fence} FOR UPDATE"
        rows = self._in_order.fetch_by_key(connection, sql, (seq, token) if token else (seq,))
        execute(connection, "SELECT set_config('lock_timeout', %s, true)", (before,))
        return Row(*rows[0])._replace(id=uuid.UUID(bytes=rows[0][1])) if rows else None

    def lock_again(self, connection: Any, seq: int, wait_ms: int) -> Row | None:
        # Primary key. One simple query of four statements: the server runs them without waiting for us in between.
        # Nothing but two integers is written into the text.
        sql = (
            f"ROLLBACK; BEGIN; SET LOCAL lock_timeout = {max(1, int(wait_ms))}; "
            f"SELECT {self._read(Row._fields)} FROM {self._q} WHERE {self._c['seq']} = {int(seq)} FOR UPDATE"
        ).replace("%%", "%")
        with connection.wrap_database_errors, psycopg.Cursor(connection.connection) as cursor:
            cursor.execute(sql)
            while cursor.nextset():
                pass
            row = cursor.fetchone()
        connection.needs_rollback = False  # this was the rollback; a save() that failed in the handler had asked for it
        execute(connection, "SELECT set_config('lock_timeout', '0', true)", ())
        return Row(*row) if row else None

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
        values = {"deliveries": deliveries, "cancels": cancels, "failures": failures}
        values |= {"lease_token": None, "lease_owner": None, "lease_expires": None}
        values = {name: value for name, value in values.items() if name in c}
        if headers is not None:
            values["headers"] = headers
        fence = f" AND {c['lease_token']} = %s" if token else ""
        # Primary key. The caller holds the row's lock from ``lock``.
        sql = f"UPDATE {self._q} SET {', '.join(f'{c[name]} = %s' for name in values)} WHERE {c['seq']} = %s{fence}"
        params = (*values.values(), seq)
        return self._in_order.execute_by_key(connection, sql, (*params, token) if token else params)

    def remove(self, connection: Any, seqs: Sequence[int]) -> int:
        # Primary key.
        sql = f"DELETE FROM {self._q} WHERE {self._c['seq']} = ANY(%s)"
        return self._in_order.execute_by_key(connection, sql, (list(seqs),))

    # -- housekeeping ---------------------------------------------------------------------------------------------

    def purge_expired(self, connection: Any, limit: int) -> list[uuid.UUID]:
        return [as_uuid(one) for (one,) in self._purge_expired(connection, limit, self._c["id"])]

    def take_expired(self, connection: Any, limit: int) -> list[Row]:
        return self._rows_of(self._purge_expired(connection, limit, self._read(Row._fields)))

    def _purge_expired(self, connection: Any, limit: int, returned: str) -> list[Any]:
        if not self.table.has("expires"):
            return []
        seq, expires, expiry = self._c["seq"], self._c["expires"], self.table.expiry
        # The partial index on expires, and where messages expire by their age the one on enqueued_at; SKIP LOCKED leaves
        # what a receiver holds to that receiver. A leased message may still be acked, so it is not touched before its lease
        # is over, unless the queue says otherwise.
        lease = (
            f" AND ({self._c['lease_expires']} IS NULL OR {self._c['lease_expires']} < clock_timestamp())"
            if self.table.has("lease_expires") and not self.table.expire_leased
            else ""
        )
        looks = (
            [("expires", f"{expires} IS NOT NULL AND {expires} <= {self._clock}")]
            if expiry is None
            else expiry.found_by(self._expiry_terms(self._clock))
        )
        gone: list[Any] = []
        for by, over in looks:
            sql = (
                f"DELETE FROM {self._q} WHERE {seq} = ANY(ARRAY(SELECT {seq} FROM {self._q} WHERE {over}{lease} "
                f"ORDER BY {self._c[by]} LIMIT %s FOR UPDATE SKIP LOCKED)) RETURNING {returned}"
            )
            if (left := limit - len(gone)) > 0:
                gone += self._in_order.fetch(connection, sql, (left,))
        return gone

    def purge(self, connection: Any, limit: int) -> int:
        seq = self._c["seq"]
        lease = ""
        if self.table.has("lease_expires"):
            lease = f"WHERE ({self._c['lease_expires']} IS NULL OR {self._c['lease_expires']} < clock_timestamp()"
            lease += f" OR {held(self._c)})" if self.table.has_unevaluated else ")"
        # Primary key, from the head; what a receiver holds stays.
        sql = (
            f"DELETE FROM {self._q} WHERE {seq} = ANY(ARRAY(SELECT {seq} FROM {self._q} {lease} "
            f"ORDER BY {seq} LIMIT %s FOR UPDATE SKIP LOCKED))"
        )
        return self._in_order.execute(connection, sql, (limit,))

    def release_owner(self, connection: Any, owner: uuid.UUID, limit: int, *, started: bool = True) -> int:
        c = self._c
        # What that index holds.
        leased = f" AND {c['lease_token']} IS NOT NULL" if self.table.lease_index is not None else ""
        uncount = "" if started else f", {c['deliveries']} = {c['deliveries']} - {self._counted()}"
        # No index on the owner, but where messages are shared out: a scan, run once per dead subscriber, in batches, by the
        # housekeeping process.
        sql = (
            f"UPDATE {self._q} SET {c['lease_token']} = NULL, {c['lease_owner']} = NULL, {c['lease_expires']} = NULL"
            f"{uncount} WHERE {c['seq']} = ANY(ARRAY(SELECT {c['seq']} FROM {self._q} WHERE {c['lease_owner']} = %s{leased} "
            f"ORDER BY {c['seq']} LIMIT %s FOR UPDATE SKIP LOCKED))"
        )
        return execute(connection, sql, (owner, limit))

    def _counted(self) -> str:
        """Whether the delivery of a leased row is counted: not of what was shared out and never taken up."""
        c = self._c
        return (
            f"(CASE WHEN {c['lease_token']} = {c['lease_owner']} THEN 0 ELSE 1 END)" if self.table.lease_index else "1"
        )

    def clamp_priorities(self, connection: Any, recipients: Sequence[str], limit: int) -> dict[int, int]:
        highest = self.table.levels - 1
        if highest < 0:
            return {}
        addressed = "recipient" in self.table.claim_by
        wanted = recipients if addressed else [""]
        sides = [(name, *side) for side in ((highest + 1, _SMALLINT[1]), (_SMALLINT[0], -1)) for name in wanted]
        seq, priority = self._c["seq"], self._c["priority"]
        names, low, high = (
            (f"{self._c['recipient']}, {priority}", "l.recipient, l.low", "l.recipient, l.high")
            if addressed
            else (priority, "l.low", "l.high")
        )
        # The claim index, two seeks a recipient: nothing lies there as a rule, however many messages wait in the levels
        # between. Safe: as a claim it takes what is free, SKIP LOCKED waits for nobody, and the LIMIT holds; ``u`` updates rows
        # that ``m`` has locked. They stay free and keep their seq, so whoever finds one next takes it as any other.
        scan = (
            f"SELECT {seq}, {priority} FROM {self._q} WHERE ({names}) >= ({low}) AND ({names}) <= ({high}) AND {self._free} "
            f"ORDER BY {names}, {seq} LIMIT %s FOR UPDATE SKIP LOCKED"
        )
        sql = (
            "WITH m AS MATERIALIZED (SELECT x.seq, x.priority FROM unnest(%s::varchar[], %s::smallint[], %s::smallint[]) "
            f"AS l(recipient, low, high) CROSS JOIN LATERAL ({scan}) AS x(seq, priority) LIMIT %s), "
            f"u AS (UPDATE {self._q} SET {priority} = CASE WHEN {priority} < 0 THEN 0 ELSE %s::smallint END "
            f"WHERE {seq} = ANY(ARRAY(SELECT m.seq FROM m))) SELECT m.priority, count(*) FROM m GROUP BY m.priority"
        )
        return dict(fetch(connection, sql, (*map(list, zip(*sides, strict=True)), limit, limit, highest)))

    def is_empty(self, connection: Any) -> bool:
        # Primary key, first entry.
        return not fetch(connection, f"SELECT 1 FROM {self._q} LIMIT 1", ())

    # -- between tables -------------------------------------------------------------------------------------------

    def insert_row(self, connection: Any, row: Row, *, same_queue: bool = False) -> None:
        row = self.table.within_levels(row)
        names = Row._fields if same_queue else self.table.moved(Row._fields)
        given = {name: getattr(row, name) for name in names if name in self._c}
        given = {name: value for name, value in given.items() if value is not None}
        given.pop("seq")
        columns = [self._c[name] for name in [*given, *self._filled]]
        values = [*(to_utc(self.table, name, "%s") for name in given), *self._filled.values()]
        # No index beyond those of the table; safe: one row, the caller's transaction.
        sql = f"INSERT INTO {self._q} ({', '.join(columns)}) VALUES ({', '.join(values)})"
        with translated(connection, self.table.db_table):
            execute(connection, sql, tuple(given.values()))

    def insert_from(
        self, connection: Any, source: StoreTable, keys: Sequence[int], *, reset_counts: bool = False
    ) -> int:
        names = self.table.moved(name for name in (*WHOLE, *(() if reset_counts else COUNTS)) if self.table.has(name))
        columns = [self._c[name] for name in ["id", *names, *self._filled]]
        values = [f"s.{quote(source.columns['message_id'])}"]
        values += [to_utc(self.table, name, f"s.{quote(source.columns[name])}") for name in names]
        values += self._filled.values()
        params: tuple[Any, ...] = (list(keys),)
        if self.table.levels:
            place = 1 + names.index("priority")
            values[place] = f"least(greatest({values[place]}, 0), %s)"
            params = (self.table.levels - 1, *params)
        # Primary key of the source; the caller holds the locks of its rows and deletes them in the same transaction.
        sql = (
            f"INSERT INTO {self._q} ({', '.join(columns)}) SELECT {', '.join(values)} FROM {quote_table(source.db_table)} s "
            f"WHERE s.{quote(source.key)} = ANY(%s) ORDER BY s.{quote(source.order)}, s.{quote(source.key)}"
        )
        with translated(connection, self.table.db_table):
            return execute(connection, sql, params)


assert MAX_SEQ == 2**63 - 1  # bigint
