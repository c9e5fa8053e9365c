"""PostgreSQL: leases are looked after with SKIP LOCKED and, for the table's own lock, a ``lock_timeout``."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from .index_order import IndexOrder
from .session import execute


class PostgresqlUpkeep:
    """The verbs of one queue; ``_q`` and ``_c`` are its names, quoted."""

    _q: str
    _c: dict[str, str]
    _in_order: IndexOrder
    _alive: str
    _fenced: str

    def renew(self, connection: Any, seqs: Sequence[int], token: uuid.UUID, lease_ms: int, wait_ms: int) -> list[int]:
        expires = self._c["lease_expires"]
        # Primary key (``_reached``), safe as said there. greatest(): a lease that its handler has lengthened stays long.
        sql = (
            f"UPDATE {self._q} SET {expires} = greatest({expires}, clock_timestamp() + %s * interval '1 ms') "
            f"WHERE {self._reached()}{self._alive} RETURNING {self._c['seq']}"
        )
        return self._within(connection, wait_ms, sql, (lease_ms, list(seqs), token))

    def try_ack(self, connection: Any, seqs: Sequence[int], token: uuid.UUID, wait_ms: int) -> list[int]:
        # Primary key (``_reached``), safe as said there.
        sql = f"DELETE FROM {self._q} WHERE {self._reached()} RETURNING {self._c['seq']}"
        return self._within(connection, wait_ms, sql, (list(seqs), token))

    def try_give_back(self, connection: Any, seqs: Sequence[int], token: uuid.UUID, wait_ms: int) -> list[int]:
        c = self._c
        # Primary key (``_reached``), safe as said there. The message keeps its seq, so its old place.
        sql = (
            f"UPDATE {self._q} SET {c['lease_token']} = NULL, {c['lease_owner']} = NULL, {c['lease_expires']} = NULL, "
            f"{c['deliveries']} = {c['deliveries']} - 1 WHERE {self._reached()} RETURNING {c['seq']}"
        )
        return self._within(connection, wait_ms, sql, (list(seqs), token))

    def _reached(self) -> str:
        # Primary key, one seek a key. Safe: the token fences, read from the latest version of a row that is locked from
        # then on, so the statement around it meets no other. SKIP LOCKED: it waits for nobody's row, and cannot deadlock.
        seq = self._c["seq"]
        return (
            f"{seq} = ANY(ARRAY(SELECT {seq} FROM {self._q} WHERE {seq} = ANY(%s) AND {self._fenced} "
            f"FOR UPDATE SKIP LOCKED))"
        )

    def _within(self, connection: Any, wait_ms: int, sql: str, params: Sequence[Any]) -> list[int]:
        # For the transaction alone: a pooler hands the session on to others.
        execute(connection, "SELECT set_config('lock_timeout', %s, true)", (f"{max(1, wait_ms)}ms",))
        return sorted(seq for (seq,) in self._in_order.fetch_by_key(connection, sql, params))
