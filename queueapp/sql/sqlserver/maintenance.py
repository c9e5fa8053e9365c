"""SQL Server: recording failures, purging and releasing, messages that are pending evaluation, and delayed ones."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from ...messages.ids import as_uuid
from ..maintenance import DelayedStore, Failures, Maintenance, Unevaluated
from ..message_columns import SENT, Kind, Outgoing, Row
from ..tables import StoreTable
from .errors import LockTimeout
from .inserts import given
from .key_locks import EXISTING, lock_keys_of
from .statements import (
    KEYS,
    LATER,
    LOOKING,
    MAX_BATCH,
    TAKING,
    Statements,
    execute,
    fetch,
    fetch_within,
    guid,
    json_of,
    later_params,
    quote,
    quote_table,
    unevaluated,
)

#: An identity may have been seeded below zero.
_BEFORE_ALL = -(2**63)
_SIDES = (
    "OPENJSON(%s) WITH ([n] int '$[0]', [recipient] nvarchar(200) '$[1]', [low] smallint '$[2]', [high] smallint "
    "'$[3]') AS l"
)


class SqlServerFailures(Statements, Failures):
    """The message is found by its primary key."""

    def lock(self, connection: Any, seq: int, token: uuid.UUID | None, wait_ms: int) -> Row | None:
        fence = f" AND q.{self._c['lease_token']} = %s" if token else ""
        # Index: the primary key. Safe: the waiter queues on the row's lock, so a claim with READPAST cannot overtake
        # it; the failed attempt is always counted, regardless of how many workers claim.
        sql = f"{self._locking()} WHERE q.{self._c['seq']} = %s{fence}"
        return self._as_row(fetch_within(connection, max(1, wait_ms), sql, (seq, token) if token else (seq,)))

    def rollback_and_lock(self, connection: Any, seq: int, wait_ms: int) -> Row | None:
        # Index: the primary key. Safe: one batch, so the server does not wait for the client between the rollback and
        # the lock. No parameters, because a batch with parameters may not change the number of open transactions; only
        # two integers are written into the text.
        connection.needs_rollback = False  # this is the rollback, which Django's cursor would refuse to run
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

    def requeue(
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
        # Index: the primary key, one seek a key (KEYS). Safe: the caller holds the locks, or purges by hand.
        sql = f"DELETE q {KEYS} {self._q} AS q WITH (ROWLOCK) ON q.{self._c['seq']} = k.[key]"
        return execute(connection, sql, (json_of(list(seqs)),))


class SqlServerMaintenance(Statements, Maintenance):
    """Rows are looked for under LOOKING and taken by key under TAKING: no verb waits for a row, and none locks the
    table."""

    def _looked_for(self, condition: str) -> str:
        # Index: the primary key, after the key in the last parameter. Safe: LOOKING; found here, taken by
        # ``_take_keys``.
        return (
            f"SELECT TOP (%s) q.{self._c['seq']} FROM {self._q} AS q WITH ({LOOKING}) "
            f"WHERE {condition} AND q.{self._c['seq']} > %s ORDER BY q.{self._c['seq']}"
        )

    def _by_key(self, condition: str) -> str:
        # Index: the primary key, one seek a key (KEYS). Safe: TAKING, checking again under the lock; no row between the
        # keys is locked, so ``MAX_BATCH`` bounds the locks and no statement locks the table.
        return f"{KEYS} {self._q} AS q WITH ({TAKING}) ON q.{self._c['seq']} = k.[key] WHERE {condition}"

    def _take_keys(self, connection: Any, look: str, take: str, limit: int, of_condition: Sequence[Any]) -> int:
        """Take the rows that ``look`` finds, in pieces, each after the last key of the piece before: a piece of which
        other sessions took some rows is not the last one."""
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
        return [as_uuid(key) for (key,) in self._purge_expired(connection, limit, f"deleted.{self._c['id']}")]

    def take_expired(self, connection: Any, limit: int) -> list[Row]:
        return self._rows_of(self._purge_expired(connection, limit, self._row.of("deleted")))

    def _purge_expired(self, connection: Any, limit: int, returned: str) -> list[Any]:
        if not self.table.has("expires"):
            return []
        expires, expiry = f"q.{self._c['expires']}", self.table.expiry
        looks = (
            [("expires", f"{expires} IS NOT NULL AND {expires} <= SYSUTCDATETIME()")]
            if expiry is None
            else expiry.found_by(self.expiry_terms())
        )
        gone: list[Any] = []
        for by, over in looks:
            # A leased message may still be acked: it is not deleted before its lease ends, unless the queue is
            # configured so.
            expired = over if self.table.expire_leased else f"{over} AND {self.unleased()}"
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
                taken = fetch(connection, take, (json_of(keys),)) if keys else []
                gone += taken
                if len(keys) < size or not taken:
                    break
        return gone

    def purge(self, connection: Any, limit: int) -> int:
        unleased = self.unleased()
        if self.table.has_unevaluated:
            unleased = f"({unleased} OR {unevaluated(self._c)})"
        return self._take_keys(connection, self._looked_for(unleased), f"DELETE q {self._by_key(unleased)}", limit, ())

    def release_owner(self, connection: Any, owner: uuid.UUID, limit: int, *, started: bool = True) -> int:
        c = self._c
        # A message that was shared out and never taken up was not counted.
        counted = "1" if self.table.lease_index is None else f"IIF({c['lease_token']} = {c['lease_owner']}, 0, 1)"
        uncount = "" if started else f", {c['deliveries']} = {c['deliveries']} - {counted}"
        # The look scans the primary key, once per dead subscriber, in the maintenance process. A row that another
        # session took in between has another owner.
        owned = f"q.{c['lease_owner']} = %s"
        take = f"UPDATE q {self._unlease()}{uncount} {self._by_key(owned)}"
        return self._take_keys(connection, self._looked_for(owned), take, limit, (owner,))

    def clamp_priorities(self, connection: Any, recipients: Sequence[str], limit: int) -> dict[int, int]:
        highest = self.table.levels - 1
        if highest < 0:
            return {}
        priority = self._c["priority"]
        addressed = "recipient" in self.table.claim_by
        wanted = recipients if addressed else [""]
        sides = [(name, *side) for side in ((highest + 1, 2**15 - 1, highest), (-(2**15), -1, 0)) for name in wanted]
        named = f"q.{self._c['recipient']} = %s AND " if addressed else ""
        # Index: the claim index, by hint, one seek a side: normally nothing lies there. Safe: LOOKING; the result is a
        # hint only.
        sql = (
            f"SELECT l.[n] FROM {_SIDES} WHERE EXISTS (SELECT 1 FROM {self._q} AS q WITH ({self._index}{LOOKING}) "
            f"WHERE {named.replace('%s', 'l.[recipient]')}q.{priority} BETWEEN l.[low] AND l.[high] AND {self.free()}) "
            "ORDER BY l.[n]"
        )
        numbered = json_of([(n, name, low, high) for n, (name, low, high, _) in enumerate(sides)])
        moved: dict[int, int] = {}
        remaining = min(limit, MAX_BATCH)
        for (n,) in fetch(connection, sql, (numbered,)):
            name, low, high, nearest = sides[n]
            if remaining <= 0:
                break
            side = f"{named}q.{priority} BETWEEN CAST(%s AS smallint) AND CAST(%s AS smallint) AND {self.free()}"
            of_side = (*([name] if addressed else []), low, high)
            # Index: the same. Safe: LOOKING, so that unavailable rows on the way are not locked.
            sql = (
                f"SELECT TOP (%s) {self._seq} FROM {self._q} AS q WITH ({self._index}{LOOKING}) "
                f"WHERE {side} ORDER BY q.{priority}, {self._seq}"
            )
            keys = [seq for (seq,) in fetch(connection, sql, (remaining, *of_side))]
            # Index: the primary key, one seek a key (KEYS). Safe: TAKING, checking again; the rows were available and
            # stay so, in their position.
            sql = (
                f"UPDATE q SET {priority} = CAST(%s AS smallint) OUTPUT deleted.{priority} "
                f"{KEYS} {self._q} AS q WITH ({TAKING}) ON {self._seq} = k.[key] WHERE {side}"
            )
            for (was,) in fetch(connection, sql, (nearest, json_of(keys), *of_side)) if keys else ():
                moved[was] = moved.get(was, 0) + 1
                remaining -= 1
        return moved

    def is_empty(self, connection: Any) -> bool:
        # Index: the primary key, first entry. Safe: it waits for no lock; a locked row exists.
        try:
            return not fetch_within(connection, 0, f"SELECT TOP (1) 1 FROM {self._q} AS q WITH (READCOMMITTEDLOCK)", ())
        except LockTimeout:
            return False


class SqlServerUnevaluated(Statements, Unevaluated):
    """Pending messages are found by the filtered index on them."""

    def lock(self, connection: Any, limit: int) -> list[Row]:
        # Index: the filtered one on pending messages. Safe: TAKING waits for no row, so several evaluators share the
        # work; fewer rows than escalate to a table lock.
        sql = (
            f"SELECT TOP (%s) {self._row.of('q')} FROM {self._q} AS q WITH ({TAKING}) "
            f"WHERE {unevaluated(self._c)} ORDER BY q.{self._c['seq']}"
        )
        return self._rows_of(fetch(connection, sql, (min(limit, MAX_BATCH),)))

    def release(
        self, connection: Any, seqs: Sequence[int], priorities: Sequence[int] | None, barriers: Sequence[bool] | None
    ) -> int:
        c = self._c
        given = [("priority", "bigint", priorities), ("is_barrier", "bit", barriers)]
        used = [(name, kind, list(values)) for name, kind, values in given if values is not None]
        fields = ["[seq] bigint '$[0]'", *(f"[{name}] {kind} '$[{n}]'" for n, (name, kind, _) in enumerate(used, 1))]
        setting = ", ".join([f"{c['lease_expires']} = NULL", *(f"{c[name]} = k.[{name}]" for name, _, _ in used)])
        # Index: the primary key, one seek a key (the loop join). Safe: the caller holds the locks from ``lock``;
        # checked again nevertheless.
        sql = (
            f"UPDATE q SET {setting} FROM OPENJSON(%s) WITH ({', '.join(fields)}) AS k "
            f"INNER LOOP JOIN {self._q} AS q WITH (ROWLOCK) ON q.{c['seq']} = k.[seq] WHERE {unevaluated(c)}"
        )
        rows = list(zip(seqs, *(values for _, _, values in used), strict=True))
        return execute(connection, sql, (json_of(rows),))

    def count(self, connection: Any, limit: int) -> int:
        # Index: the filtered one on pending messages. Safe: LOOKING.
        sql = (
            f"SELECT COUNT(*) FROM (SELECT TOP (%s) 1 AS [one] FROM {self._q} AS q WITH ({LOOKING}) "
            f"WHERE {unevaluated(self._c)}) AS h"
        )
        return int(fetch(connection, sql, (limit,))[0][0])


class SqlServerDelayedStore(DelayedStore):
    """The delayed table of one database, shared by its queues."""

    def store(self, connection: Any, table: StoreTable, destination: str, message: Outgoing, due: Any) -> int:
        values: dict[str, tuple[str, tuple[Any, ...]]] = {
            "message_id": ("%s", (message.id,)),
            "destination": ("%s", (destination,)),
            "headers": ("%s", (message.headers,)),
            "due": ("%s", (due,)) if isinstance(due, datetime) else (LATER, later_params(due)),
        }
        if message.body is not None:
            values["body"] = "%s", (message.body,)
        for column in SENT:
            value = getattr(message, column.outgoing)
            if value is None:
                continue
            if column.kind is not Kind.TIME:
                values[column.name] = given(column, value)
            # It counts from the due time, not from now: otherwise a long delay would expire the message unseen.
            elif isinstance(due, datetime):
                values[column.name] = "%s", (due + timedelta(milliseconds=value),)
            else:
                values[column.name] = given(column, due + value)
        # Index: none is read. Safe: one row in the caller's transaction; due is by the database's clock.
        sql = (
            f"INSERT INTO {quote_table(table.db_table)} ({', '.join(quote(table.columns[name]) for name in values)}) "
            f"OUTPUT inserted.{quote(table.key)} VALUES ({', '.join(text for text, _ in values.values())})"
        )
        return int(fetch(connection, sql, [value for _, params in values.values() for value in params])[0][0])

    def first_due(self, connection: Any, table: StoreTable, destinations: Sequence[str]) -> list[tuple[str, int]]:
        due, destination = quote(table.columns["due"]), quote(table.columns["destination"])
        # Index: the one on (destination, due, key), the first unlocked entry of each destination; one without an entry
        # is not returned. Safe: LOOKING. The server computes the difference, so no client's clock or zone matters.
        sql = (
            f"SELECT d.[name], DATEDIFF_BIG(millisecond, SYSUTCDATETIME(), f.{due}) "
            "FROM OPENJSON(%s) WITH ([name] nvarchar(200) '$') AS d CROSS APPLY "
            f"(SELECT TOP (1) t.{due} FROM {quote_table(table.db_table)} AS t WITH ({_first(table)}{LOOKING}) "
            f"WHERE t.{destination} = d.[name] ORDER BY t.{due}) AS f ORDER BY f.{due}"
        )
        return [(name, int(ms)) for name, ms in fetch(connection, sql, (json_of(list(destinations)),))]

    def lock_due(self, connection: Any, table: StoreTable, destination: str, limit: int) -> list[int]:
        due, key = quote(table.columns["due"]), quote(table.key)
        # Index: the one on (destination, due, key), by name and FORCESEEK, because a scan, or the index on due, would
        # lock rows that are not due or have other destinations. Safe: TAKING; two dispatchers never wait for each
        # other, and never move a row twice.
        sql = (
            f"SELECT TOP (%s) t.{key} FROM {quote_table(table.db_table)} AS t WITH ({_first(table)}FORCESEEK, "
            f"{TAKING}) WHERE t.{quote(table.columns['destination'])} = %s AND t.{due} <= SYSUTCDATETIME() "
            f"ORDER BY t.{due}, t.{key}"
        )
        return [row[0] for row in fetch(connection, sql, (min(limit, MAX_BATCH), destination))]

    def delete(self, connection: Any, table: StoreTable, keys: Sequence[int]) -> int:
        # Index: the primary key, one seek a key (KEYS). Safe: the caller holds the rows' locks.
        sql = f"DELETE t {KEYS} {quote_table(table.db_table)} AS t WITH (ROWLOCK) ON t.{quote(table.key)} = k.[key]"
        return execute(connection, sql, (json_of(list(keys)),))

    def record_forwarded(
        self, connection: Any, db_table: str, forwarded: Sequence[tuple[uuid.UUID, uuid.UUID]], origin: str
    ) -> set[uuid.UUID]:
        table = quote_table(db_table)
        lock_keys_of(connection, db_table, (key for key, _ in forwarded))
        # Index: the primary key, one seek a key. Safe: under the locks of the keys, so of two transactions that record
        # the same one the second waits and then finds it.
        sql = (
            f"INSERT INTO {table} ([id], [message_id], [origin], [arrived_at]) OUTPUT inserted.[id] "
            "SELECT r.[id], r.[message_id], %s, SYSUTCDATETIME() FROM OPENJSON(%s) "
            "WITH ([id] uniqueidentifier '$[0]', [message_id] uniqueidentifier '$[1]') AS r WHERE NOT EXISTS "
            f"(SELECT 1 FROM {table} AS a WITH ({EXISTING}) WHERE a.[id] = r.[id])"
        )
        found: set[uuid.UUID] = set()
        for first in range(0, len(forwarded), MAX_BATCH):
            piece = [list(pair) for pair in forwarded[first : first + MAX_BATCH]]
            found |= {uuid.UUID(bytes=guid(key)) for (key,) in fetch(connection, sql, (origin, json_of(piece)))}
        return found


def _first(table: StoreTable) -> str:
    """The hint for the index on destination and due time, which skips the messages of other destinations."""
    return f"INDEX({quote(table.first_index)}), " if table.first_index else ""
