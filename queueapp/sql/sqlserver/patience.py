"""SQL Server: ``LOCK_TIMEOUT``, which is the session's and knows no rollback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from django.db import Error

from .session import execute


class SqlServerPatience:
    """Set back to for ever, as ``fetch_within`` does."""

    @contextmanager
    def waiting_at_most(self, connection: Any, ms: int) -> Iterator[None]:
        # No table is read, here or below.
        execute(connection, f"SET LOCK_TIMEOUT {max(1, int(ms))}", ())
        try:
            yield
        finally:
            with suppress(Error):  # a session that is lost has none to set back
                execute(connection, "SET LOCK_TIMEOUT -1", ())
