"""SQL Server: ending messages by name. What a holder may touch is a condition on the row under its lock."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from ...messages.ids import as_uuid
from ..acks import FENCED, NO_LIMITS, STRICT, LeaseHolder, Limits
from ..claims import LAST_END
from ..message_columns import Row
from .holding import held
from .locking import KEYS, LOOKING, MAX_BATCH, TAKING
from .rows import Returned
from .session import LATER, execute, fetch, json_of, later_params
from .upkeep import SqlServerUpkeep

#: Nobody's client: a parameter is never NULL.
_NOBODY = uuid.UUID(int=0)


class SqlServerBookmarks(SqlServerUpkeep):
    """The verbs of one queue; ``_q`` and ``_c`` are its names, quoted."""

    _row: Returned

    def ack_held(self, connection: Any, seqs: Sequence[int], holder: LeaseHolder) -> int:
        may, params = self._may(holder)
        return execute(connection, f"DELETE q {self._named(may)}", (json_of(list(seqs)), *params))

    def take_held(
        self,
        connection: Any,
        seqs: Sequence[int],
        holder: LeaseHolder,
        *,
        leased: bool = False,
        limits: Limits = NO_LIMITS,
    ) -> list[Row]:
        may, params = self._may_give_back(holder) if leased else self._may(holder)
        if reached := limits.reached("q." + self._c["cancels"], "q." + self._c["deliveries"]):
            may += f" AND {reached}"
        sql = f"DELETE q OUTPUT {self._row.of('deleted')} {self._named(may)}"
        return self._rows_of(fetch(connection, sql, (json_of(list(seqs)), *params)))

    def cancel_held(self, connection: Any, seqs: Sequence[int], holder: LeaseHolder, limits: Limits) -> list[int]:
        c = self._c
        may, params = self._may_give_back(holder)
        if reached := limits.reached("q." + c["cancels"], "q." + c["deliveries"]):
            may += f" AND NOT {reached}"
        # The message keeps its seq, so its old place.
        sql = (
            f"UPDATE q SET {c['lease_token']} = NULL, {c['lease_owner']} = NULL, {c['lease_expires']} = NULL, "
            f"{c['cancels']} = {c['cancels']} + 1 OUTPUT inserted.{c['seq']} {self._named(may)}"
        )
        return sorted(seq for (seq,) in fetch(connection, sql, (json_of(list(seqs)), *params)))

    def extend_held(self, connection: Any, seqs: Sequence[int], holder: LeaseHolder, lease_ms: int) -> list[int]:
        c = self._c
        until, (may, params) = f"q.{c['lease_expires']}", self._may_give_back(holder)
        may += self._alive()  # where leases are counted, what has lapsed may be somebody else's place by now
        sql = (
            f"UPDATE q SET {c['lease_expires']} = CASE WHEN {until} > %s THEN {until} ELSE {LATER} END "
            f"OUTPUT inserted.{c['seq']} {self._named(may)}"
        )
        values = (LAST_END, *later_params(lease_ms), json_of(list(seqs)), *params)
        return sorted(seq for (seq,) in fetch(connection, sql, values))

    def take_owned(self, connection: Any, owner: uuid.UUID, deliveries: int, limit: int) -> list[Row]:
        c = self._c
        owned = f"q.{c['lease_owner']} = %s AND q.{c['deliveries']} >= %s"
        # Index: the primary key, which it scans, as ``release_owner``, which comes after it. Safe: LOOKING; found here, taken
        # by key below.
        look = f"SELECT TOP (%s) q.{c['seq']} FROM {self._q} AS q WITH ({LOOKING}) WHERE {owned} ORDER BY q.{c['seq']}"
        keys = [seq for (seq,) in fetch(connection, look, (min(limit, MAX_BATCH), owner, deliveries))]
        # Index: the primary key, one seek a key (KEYS). Safe: TAKING, asking again under the lock; it passes over what a late
        # ack of the dead is just ending.
        take = (
            f"DELETE q OUTPUT {self._row.of('deleted')} {KEYS} {self._q} AS q WITH ({TAKING}) "
            f"ON q.{c['seq']} = k.[key] WHERE {owned}"
        )
        return self._rows_of(fetch(connection, take, (json_of(keys), owner, deliveries))) if keys else []

    def candidates(
        self, connection: Any, after: int, upto: int, limit: int, holder: LeaseHolder
    ) -> list[tuple[int, str, bytes | None]]:
        may, params = self._may(holder)
        seq = f"q.{self._c['seq']}"
        # Index: the primary key, in its order. Safe: LOOKING; who ends them asks again.
        sql = (
            f"SELECT TOP (%s) {seq}, q.{self._c['headers']}, q.{self._c['body']} FROM {self._q} AS q WITH ({LOOKING}) "
            f"WHERE {seq} > %s AND {seq} <= %s{may} ORDER BY {seq}"
        )
        return [(n, headers, body) for n, headers, body in fetch(connection, sql, (limit, after, upto, *params))]

    def seqs_of(self, connection: Any, ids: Sequence[uuid.UUID]) -> list[tuple[uuid.UUID, int]]:
        identity, seq = f"q.{self._c['id']}", f"q.{self._c['seq']}"
        # What is held until it is evaluated is not in the queue yet.
        there = (
            f" WHERE (q.{self._c['lease_expires']} IS NULL OR NOT {held(self._c)})"
            if self.table.has_unevaluated
            else ""
        )
        # Index: the one on id, one seek a key. Safe: READCOMMITTEDLOCK waits for who is just putting one of them in, whatever
        # READ_COMMITTED_SNAPSHOT says: an answer that it is not there would be acted upon.
        sql = (
            f"SELECT {identity}, {seq} FROM OPENJSON(%s) WITH ([key] uniqueidentifier '$') AS k "
            f"INNER LOOP JOIN {self._q} AS q WITH (ROWLOCK, READCOMMITTEDLOCK) ON {identity} = k.[key]{there}"
        )
        found = fetch(connection, sql, (json_of(list(ids)),))
        return sorted(((as_uuid(one), number) for one, number in found), key=itemgetter(1))

    # -- pieces ---------------------------------------------------------------------------------------------------

    def _named(self, may: str) -> str:
        # Index: the primary key, one seek a key (KEYS). Safe: whose it is is asked under the row's lock, so a message that was
        # leased anew meanwhile is judged by that lease; keys come ascending and are sought in that order.
        return f"{KEYS} {self._q} AS q WITH (ROWLOCK) ON q.{self._c['seq']} = k.[key] WHERE 1 = 1{may}"

    def _may(self, holder: LeaseHolder) -> tuple[str, tuple[Any, ...]]:
        """What this holder may end, as a further condition with its parameters."""
        c, client = self._c, holder.client or _NOBODY
        if holder.leasing == FENCED:
            return f" AND q.{c['lease_token']} = %s", (client,)
        if holder.leasing != STRICT:
            # What is held until it is evaluated is not in the queue yet.
            return f" AND (q.{c['lease_expires']} IS NULL OR NOT {held(c)})" if self.table.has_unevaluated else "", ()
        nobody = f"q.{c['lease_expires']} IS NULL OR q.{c['lease_expires']} < SYSUTCDATETIME()"
        return f" AND ({nobody} OR q.{c['lease_owner']} = %s OR q.{c['lease_token']} = %s)", (client, client)

    def _may_give_back(self, holder: LeaseHolder) -> tuple[str, tuple[Any, ...]]:
        """What this holder may give back, or extend: of what is leased. What was shared out to a subscriber and not taken up by it
        is in nobody's hands."""
        c, client = self._c, holder.client or _NOBODY
        taken_up = f" AND q.{c['lease_token']} <> q.{c['lease_owner']}" if self.table.lease_index else ""
        if holder.leasing == FENCED:
            return f" AND q.{c['lease_token']} = %s{taken_up}", (client,)
        leased = f" AND q.{c['lease_expires']} >= SYSUTCDATETIME(){taken_up}"
        if holder.leasing != STRICT:
            return f"{leased} AND q.{c['lease_token']} IS NOT NULL", ()
        return f"{leased} AND (q.{c['lease_owner']} = %s OR q.{c['lease_token']} = %s)", (client, client)

    def _rows_of(self, found: list[Any]) -> list[Row]:
        """What was read as ``_row``, in the order of the queue."""
        rows = (Row(*one)._replace(id=uuid.UUID(bytes=one[1])) for one in self._row.tuples(found))
        return sorted(rows, key=itemgetter(0))
