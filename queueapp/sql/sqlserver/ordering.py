"""SQL Server: claims of a queue with ordering keys."""

from __future__ import annotations

from typing import Any

from ..claims import SeqRange
from .claims import PARAMETERS, Claim, SqlServerClaims
from .errors import LockTimeout
from .statements import LATER, LOOKING, TAKING, Returned, TableText, fetch_within

#: How long a claim waits for one that is being made, or for a message whose handler outlives its lease.
WAIT_MS = 100


class OrderedClaims(SqlServerClaims):
    """A claim by lease takes of each key only messages before which no other one of that key is left in the table."""

    def __init__(self, text: TableText) -> None:
        super().__init__(text)
        self.by_lease = Claim(self._build_ordered(), Returned(self._c, self.table.claimed), values_first=True)

    def _take_range(
        self, connection: Any, claim: Claim, values: tuple[Any, ...], only: SeqRange, limit: int
    ) -> list[Any]:
        if claim is not self.by_lease:
            return super()._take_range(connection, claim, values, only, limit)
        try:
            return fetch_within(connection, WAIT_MS, claim.in_range, (*values, limit, only.low, only.high))
        except LockTimeout:
            return []

    def _build_ordered(self) -> str:
        c, key, seq, token = self._c, self._c["ordering_key"], self._c["seq"], self._c["lease_token"]
        # Indexes: the primary key; the filtered one on the keys in flight; the one on key and seq; the primary key, one
        # seek a message. Safe: TAKING locks the lowest available messages, as every claim; of them it keeps those that
        # are the first of their key: the n-th that is locked has to be the n-th that is there. That count waits for
        # messages that another claim has locked, since READPAST would not see them. LOOKING finds keys that are known
        # to be in flight, so that the scan does not stop at messages that cannot be kept.
        found = (
            f"SELECT TOP (%s) {self._seq} AS [seq], q.{key} AS [key] FROM {self._q} AS q WITH ({TAKING}) "
            f"WHERE {self._within(PARAMETERS)} AND {self.free()} AND (q.{key} IS NULL OR NOT EXISTS (SELECT 1 "
            f"FROM {self._q} AS b WITH ({LOOKING}) WHERE b.{key} = q.{key} AND b.{token} IS NOT NULL "
            f"AND b.{c['lease_expires']} >= SYSUTCDATETIME())) ORDER BY {self._seq}"
        )
        numbered = (
            "SELECT f.[seq], f.[key], ROW_NUMBER() OVER (PARTITION BY f.[key] ORDER BY f.[seq]) AS [n] "
            f"FROM ({found}) AS f"
        )
        return (
            f"UPDATE q SET {token} = %s, {c['lease_owner']} = %s, {c['lease_expires']} = {LATER}, "
            f"{c['deliveries']} = {c['deliveries']} + 1 OUTPUT {Returned(c, self.table.claimed).of('inserted')} "
            f"FROM ({numbered}) AS m INNER LOOP JOIN {self._q} AS q WITH (ROWLOCK) ON {self._seq} = m.[seq] "
            f"WHERE m.[key] IS NULL OR m.[n] = (SELECT COUNT(*) FROM {self._q} AS t WITH (READCOMMITTEDLOCK, ROWLOCK) "
            f"WHERE t.{key} = m.[key] AND t.{seq} <= m.[seq])"
        )
