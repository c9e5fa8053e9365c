"""PostgreSQL: NOTIFY and LISTEN."""

from __future__ import annotations

import selectors
from typing import Any

import psycopg

from ..notifications import ListenerConnection, Unavailable
from .packed import TEXT, PackedStatement, ready
from .session import execute

_NOTIFY = PackedStatement("SELECT pg_notify(%s, %s)", (TEXT, TEXT))


class PostgresqlEar(ListenerConnection):
    """LISTEN, on psycopg's own connection: Django's would be closed and shared as Django likes.

    What it waits on is the socket: psycopg's own wait looks up ten times a second, which was 0.4 % of a core for each process
    that listens, and of what an idle worker and its dispatcher use two fifths.
    """

    #: To wait on costs nothing: no statement, and 0.1 ms of CPU.
    slice_seconds = 0.2
    _raw: psycopg.Connection[Any] | None = None
    #: Whether something was asked since: psycopg may have in hand what was told meanwhile, and the socket would not say so.
    _asked = False

    def __init__(self, connection: Any, channel: str) -> None:
        super().__init__(connection, channel)
        self._readable = selectors.DefaultSelector()

    def connect(self) -> None:
        params = self.connection.get_connection_params()
        params = {k: v for k, v in params.items() if k not in ("context", "cursor_factory", "prepare_threshold")}
        params["connect_timeout"] = params.get("connect_timeout", 10)
        params["prepare_threshold"] = None  # its few statements are not worth a prepared one, which poolers may mix up
        with self.connection.wrap_database_errors:
            self._raw = psycopg.Connection.connect(**params, autocommit=True)
        self._readable.register(self._raw.fileno(), selectors.EVENT_READ)
        self.connection.connection = self._raw  # for whoever has to cut it

    def listen(self) -> None:
        # Whoever reads this statement in pg_stat_activity sees an ear.
        self._execute(f'LISTEN "{self.channel}"')

    def received(self, seconds: float) -> list[str]:
        raw = self._open()
        if self._asked:
            self._asked = False
            if told := self._told(raw):
                return told
        return self._told(raw) if self._readable.select(seconds) else []

    def ping(self) -> None:
        self._execute("SELECT 1")

    @property
    def broken(self) -> bool:
        return self._raw is None or self._raw.broken

    def close(self) -> None:
        self._readable.close()
        if self._raw is not None:
            self._raw.close()

    def _told(self, raw: psycopg.Connection[Any]) -> list[str]:
        """What has arrived by now."""
        with self.connection.wrap_database_errors:
            return [one.payload for one in raw.notifies(timeout=0, stop_after=1)]

    def _execute(self, sql: Any) -> None:
        self._asked = True
        with self.connection.wrap_database_errors:
            self._open().execute(sql)

    def _open(self) -> psycopg.Connection[Any]:
        if self._raw is None:
            raise psycopg.InterfaceError("the ear is not connected")
        return self._raw


class PostgresqlWakeUps:
    """There is nothing to make, and nobody needs a right for it."""

    def may_notify(self, connection: Any) -> bool:
        return True

    def notify(self, connection: Any, channel: str, payload: str) -> None:
        # Takes a cluster-wide lock at commit: called after commit, throttled, never from a trigger.
        # A trip of its own: 18 µs, of which 7 could be had where it travels with the INSERT in two transactions. No table.
        if ready(connection):
            _NOTIFY.execute(connection, [channel.encode(), payload.encode()])
        else:
            execute(connection, "SELECT pg_notify(%s, %s)", (channel, payload))

    def ear(self, connection: Any, channel: str) -> ListenerConnection:
        return PostgresqlEar(connection, channel)

    def prepare_wake_ups(self, connection: Any) -> None:
        """Nothing to make."""

    def lacking_for_wake_ups(self, connection: Any) -> Unavailable | None:
        return None
