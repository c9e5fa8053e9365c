"""Calls handlers as the receive tasks do, on a thread that lives as long as the test: its connections are its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from django.db import connections, transaction

from queueapp.sql import SessionState, backend_of, queue_sql
from queueapp.sql.claims import SEQ
from tests.in_process_worker import eventually
from tests.queueapp.sql.server import ALL, Server
from tests.testapp.models import Effect, Transactional
from workers.connections.connection_guard import ConnectionGuard, LeakedState
from workers.receiving.receivers.base import Rollback

Handler = Callable[["GuardedThread"], Any]


def elsewhere(alias: str) -> str:
    """The other alias on the same database."""
    return f"elsewhere_{alias}"


class GuardedThread:
    """One task's thread. What takes a ``Handler`` runs it there; the test looks on from its own connection."""

    def __init__(self, alias: str) -> None:
        self.alias = alias
        #: Another alias than the task's.
        self.elsewhere = elsewhere(alias)
        self.server = Server(alias)
        self.vendor = self.server.vendor
        self._thread = ThreadPoolExecutor(1, "task")
        self.guard: ConnectionGuard = self.do(lambda: ConnectionGuard(alias))
        #: What a handler wants to outlive it.
        self.kept: Any = None
        #: What the handler that ran last had raised.
        self.failed: BaseException | None = None

    def do(self, call: Callable[[], Any]) -> Any:
        """Call it on the task's thread."""
        return self._thread.submit(call).result()

    def close(self) -> None:
        self.do(connections.close_all)
        self.failed = self.kept = None  # a traceback keeps what its frames held, sessions among it
        self._thread.shutdown()
        self.server.close()

    # -- on the task's thread ---------------------------------------------------------------------------------------

    @property
    def connection(self) -> Any:
        """The own alias of the thread that asks."""
        return connections[self.alias]

    @property
    def second_alias(self) -> Any:
        """The other alias of the thread that asks."""
        return connections[self.elsewhere]

    def run(self, sql: str, alias: str | None = None) -> list[Any]:
        """A statement by Django's cursor; its rows, if it has any."""
        with connections[alias or self.alias].cursor() as cursor:
            cursor.execute(sql)
            return list(cursor.fetchall()) if cursor.description else []

    def write(self, name: str, alias: str | None = None) -> None:
        Effect.objects.using(alias or self.alias).create(name=name)

    def call(self, handler: Handler) -> None:
        """What every task does, without the judgement; ``failed`` is what the handler raised."""
        self.failed = None
        self.guard.before()
        try:
            handler(self)
        except BaseException as error:
            self.failed = error

    # -- what tasks do ----------------------------------------------------------------------------------------------

    def in_autocommit(self, handler: Handler) -> LeakedState | None:
        """Call it as AT_LEAST_ONCE and AT_MOST_ONCE do."""
        self.do(self.connection_of_the_task)
        return self.do(lambda: (self.call(handler), self.guard.after(self.failed))[1])

    def connection_of_the_task(self) -> None:
        """A task has claimed before it hands out, so there is a session."""
        self.connection.ensure_connection()

    def in_transaction(self, handler: Handler) -> LeakedState | None:
        """Take the first message and call it as TRANSACTIONAL does: claim, handler and commit, or a rollback in place
        when there is still something to roll back."""
        return self.do(lambda: self._in_transaction(handler))

    def _in_transaction(self, handler: Handler) -> LeakedState | None:
        connection = self.connection
        sql = queue_sql(Transactional, connection)
        after = None
        try:
            with transaction.atomic(using=self.alias):
                # A session that was closed holds its message until its server has rolled it back: in its own time.
                (claimed,) = eventually(lambda: sql.claims.claim_by_delete(connection, ALL, 1))
                seq = claimed[SEQ]
                self.call(handler)
                after = self.guard.after(
                    self.failed, lambda seq: sql.failures.lock(connection, seq, None, 1000) is None, seq
                )
                if after is not None and after.replaced:
                    raise Rollback
                if after is not None or self.failed is not None:
                    sql.failures.rollback_and_lock(connection, seq, 1000)
                    connection.run_on_commit = []
                    raise Rollback
        except Rollback:
            pass
        return after

    # -- what must hold afterwards ------------------------------------------------------------------------------------

    def works(self) -> None:
        """The next messages on that thread find everything as the first one did, and what they do is kept."""
        Effect.objects.using(self.alias).filter(name="next").delete()
        waiting = len(self.messages())
        self.server.put(Transactional)
        for attempt in (
            lambda: self.in_autocommit(lambda guarded: guarded.write("next")),
            lambda: self.in_autocommit(lambda guarded: guarded.write("next", guarded.elsewhere)),
            lambda: self.in_transaction(lambda guarded: guarded.write("next")),
        ):
            assert attempt() is None
            assert self.failed is None, repr(self.failed)
        assert len(self.effects("next")) == 3
        assert len(self.messages()) == waiting
        self.do(self.is_as_opened)

    def is_as_opened(self) -> None:
        """Nothing is open on the own alias, whomever one asks."""
        connection = self.connection
        assert connection.get_autocommit()
        assert not connection.in_atomic_block
        assert not connection.needs_rollback
        assert not connection.savepoint_ids
        assert not connection.atomic_blocks
        assert not connection.run_on_commit
        assert backend_of(connection).sessions.state(connection, ask=True) is SessionState.IDLE

    def effects(self, name: str) -> list[Any]:
        """What has been committed under a name."""
        return list(Effect.objects.using(self.alias).filter(name=name))

    def messages(self) -> list[int]:
        return self.server.seqs(Transactional)
