"""SQL Server: how many workers a queue wants, as a text that others run."""

from __future__ import annotations

from ..figures import WorkersWanted
from .counting import SqlServerCounting
from .locking import LOOKING
from .session import quote


class SqlServerScaling(SqlServerCounting):
    """The verbs of one queue."""

    def wanted_text(self, wanted: WorkersWanted) -> str:
        lag, least, most = "0", wanted.min_workers, wanted.max_workers
        if wanted.late_ms is not None:
            late = wanted.late_ms
            share = f"CASE WHEN b.[oldest] > {2 * late} THEN 2.0 ELSE b.[oldest] / {late}.0 END"
            lag = f"CASE WHEN b.[oldest] > {late} THEN CEILING(w.[workers] * {share}) ELSE 0 END"
        # Index: the primary key, its first rows; of the subscribers the one on queue. Safe: LOOKING.
        return (
            f"SELECT CAST(CASE WHEN m.[more] < {least} THEN {least} WHEN m.[more] > {most} THEN {most} "
            "ELSE m.[more] END AS int) AS [wanted] FROM (SELECT CASE WHEN n.[need] > n.[lag] THEN n.[need] ELSE n.[lag] END AS [more] "
            f"FROM (SELECT CEILING(b.[backlog] / {wanted.per_worker}.0) AS [need], {lag} AS [lag] FROM "
            "(SELECT COUNT(CASE WHEN h.[state] IN ('free', 'lapsed', 'leased') THEN 1 END) AS [backlog], "
            "MAX(CASE WHEN h.[state] IN ('free', 'lapsed') THEN h.[age] END) AS [oldest] "
            f"FROM ({self._head('', ()) % (wanted.rows,)}) AS h) AS b CROSS JOIN "
            f"(SELECT COUNT(*) AS [workers] FROM {quote(wanted.subscribers)} AS s WITH ({LOOKING}) "
            f"WHERE s.[queue] = '{wanted.quoted_label}' AND s.[receives] = 1 AND s.[alive_until] > SYSUTCDATETIME()) AS w) AS n) AS m"
        )
