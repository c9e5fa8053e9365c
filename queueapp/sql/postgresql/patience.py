"""PostgreSQL: ``lock_timeout``, for one transaction or a part of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .session import execute, fetch

_SET = "SELECT current_setting('lock_timeout'), set_config('lock_timeout', %s, true)"


class PostgresqlPatience:
    """What was set before comes back: by the rollback when the block raises, by a statement where a transaction goes on."""

    @contextmanager
    def waiting_at_most(self, connection: Any, ms: int) -> Iterator[None]:
        # No table is read, here or below.
        before = fetch(connection, _SET, (f"{max(1, int(ms))}ms",))[0][0]
        yield
        if len(connection.savepoint_ids) > 0:
            execute(connection, "SELECT set_config('lock_timeout', %s, true)", (before,))
