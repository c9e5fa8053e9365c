"""PostgreSQL: how many workers a queue wants, as a text that others run."""

from __future__ import annotations

from ..figures import WorkersWanted
from .counting import PostgresqlCounting


class PostgresqlScaling(PostgresqlCounting):
    """The verbs of one queue."""

    def wanted_text(self, wanted: WorkersWanted) -> str:
        lag = "0"
        if wanted.late_ms is not None:
            late = wanted.late_ms
            lag = f"CASE WHEN b.oldest > {late} THEN ceil(w.workers * least(b.oldest / {late}::numeric, 2)) ELSE 0 END"
        subscribers = '"' + wanted.subscribers.replace('"', '""') + '"'
        # Index: the primary key, its first rows; of the subscribers the one on queue. Safe: a plain read.
        return (
            f"SELECT greatest({wanted.min_workers}, least({wanted.max_workers}, "
            f"greatest(ceil(b.backlog / {wanted.per_worker}::numeric), {lag})))::int AS wanted FROM "
            "(SELECT count(*) FILTER (WHERE h.state IN ('free', 'lapsed', 'leased', 'taken')) AS backlog, "
            "max(h.age) FILTER (WHERE h.state IN ('free', 'lapsed')) AS oldest "
            f"FROM ({self._head('', ()) % (wanted.rows,)}) AS h(seq, state, age)) AS b, "
            f"(SELECT count(*) AS workers FROM {subscribers} WHERE queue = '{wanted.quoted_label}' "
            "AND receives AND alive_until > statement_timestamp()) AS w"
        )
