"""SQL Server: leases are looked after with READPAST and, for the table's own lock, a ``LOCK_TIMEOUT``."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from ..tables import QueueTable
from .locking import KEYS, TAKING
from .session import LATER, fetch_within, json_of, later_params


class SqlServerUpkeep:
    """The verbs of one queue; ``_q`` and ``_c`` are its names, quoted."""

    table: QueueTable
    _q: str
    _c: dict[str, str]

    def renew(self, connection: Any, seqs: Sequence[int], token: uuid.UUID, lease_ms: int, wait_ms: int) -> list[int]:
        c = self._c
        expires = f"q.{c['lease_expires']}"
        # Index and safety: ``_reached``. CASE: a lease that its handler has lengthened stays long (GREATEST came in 2022).
        sql = (
            f"UPDATE q SET {c['lease_expires']} = CASE WHEN {expires} > {LATER} THEN {expires} ELSE {LATER} END "
            f"OUTPUT inserted.{c['seq']} {self._reached()}{self._alive()}"
        )
        return self._within(connection, wait_ms, sql, (*later_params(lease_ms) * 2, json_of(list(seqs)), token))

    def try_ack(self, connection: Any, seqs: Sequence[int], token: uuid.UUID, wait_ms: int) -> list[int]:
        # Index and safety: ``_reached``.
        sql = f"DELETE q OUTPUT deleted.{self._c['seq']} {self._reached()}"
        return self._within(connection, wait_ms, sql, (json_of(list(seqs)), token))

    def try_give_back(self, connection: Any, seqs: Sequence[int], token: uuid.UUID, wait_ms: int) -> list[int]:
        c = self._c
        # Index and safety: ``_reached``. The message keeps its seq, so its old place.
        sql = (
            f"UPDATE q SET {c['lease_token']} = NULL, {c['lease_owner']} = NULL, {c['lease_expires']} = NULL, "
            f"{c['deliveries']} = {c['deliveries']} - 1 OUTPUT inserted.{c['seq']} {self._reached()}"
        )
        return self._within(connection, wait_ms, sql, (json_of(list(seqs)), token))

    def _alive(self) -> str:
        """What a lease that is lengthened must fulfil beside its token: where leases are counted, one that has lapsed may have
        given away its place."""
        return "" if not self.table.counts_in_flight else f" AND q.{self._c['lease_expires']} >= SYSUTCDATETIME()"

    def _reached(self) -> str:
        # Index: the primary key, one seek a key (KEYS). Safe: the token fences, a stale one touches nothing. TAKING: what
        # somebody has locked is passed over, so it waits for nobody's row and cannot deadlock.
        c = self._c
        return f"{KEYS} {self._q} AS q WITH ({TAKING}) ON q.{c['seq']} = k.[key] WHERE q.{c['lease_token']} = %s"

    @staticmethod
    def _within(connection: Any, wait_ms: int, sql: str, params: Sequence[Any]) -> list[int]:
        return sorted(seq for (seq,) in fetch_within(connection, wait_ms, sql, params))
