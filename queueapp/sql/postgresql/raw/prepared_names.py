"""The names of prepared statements, and whether statements are prepared at all: a connection pooler affects both.

psycopg numbers its names from 0 in every process. Where a pooler passes server sessions from one client to the next,
such a name may denote a statement of another process: an INSERT lands in another queue's table, without an error. So
each name contains the hash of its statement: it denotes that statement or nothing. Behind such a pooler names are
missing or taken unpredictably, which breaks the transaction. So each process probes once per database whether there is
one; in that case, or at the first name that is missing or taken all the same, it prepares nothing any more.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import sys
import threading
import uuid
from functools import lru_cache
from typing import Any

import psycopg
from psycopg import capabilities, errors
from psycopg._preparing import Prepare, PrepareManager
from psycopg.abc import PQGen
from psycopg.generators import execute as results_of
from psycopg.pq import ExecStatus, PipelineStatus, TransactionStatus
from psycopg.pq.abc import PGconn, PGresult

log = logging.getLogger("queueapp")

#: Errors of a statement whose name is unknown to the session (26000) or taken (42P05), or whose result columns have
#: changed since it was prepared (0A000) because another session has altered the table.
NAME_CONFLICTS = (errors.InvalidSqlStatementName, errors.DuplicatePreparedStatement, errors.FeatureNotSupported)
#: The server function that reports the last of these; its text is localized.
_ALTERED = "RevalidateCachedQuery"

_TEXT_OID = 25
_YES, _NO = Prepare.YES, (Prepare.NO, b"")
_NOTHING: Any = ()


class ServerRoute:
    """Whether the route from this process to one database, poolers included, supports prepared statements."""

    __slots__ = ("_database", "_lock", "prepares")

    def __init__(self, database: str) -> None:
        self._database = database
        self._lock = threading.Lock()
        #: Whether statements may be prepared. None: not probed yet, so none is.
        self.prepares: bool | None = None

    def record(self, why_not: str | None) -> None:
        """Record the outcome of a probe; it cannot revoke what an error has shown meanwhile."""
        with self._lock:
            if self.prepares is None:
                self.prepares = why_not is None
                if why_not is not None:
                    self._warn(why_not)

    def disable(self, error: psycopg.Error) -> None:
        """After one of ``NAME_CONFLICTS``: prepare no more."""
        with self._lock:
            if self.prepares:
                self.prepares = False
                self._warn(str(error).strip())

    def _warn(self, why_not: str) -> None:
        log.warning(
            "Prepared statements are disabled for database %s in this process, so single messages are slower: %s. "
            "Enable prepared "
            "statements in the pooler (PgBouncer 1.22: max_prepared_statements), or set QUEUEAPP.PREPARED_STATEMENTS "
            "to False.",
            self._database,
            why_not,
        )


_routes: dict[tuple[bytes, ...], ServerRoute] = {}


class StatementNames(PrepareManager):
    """psycopg's list of prepared statements of one connection, with names by content; it covers user statements,
    too."""

    def __init__(self, before: PrepareManager, route: ServerRoute) -> None:
        super().__init__()
        self.__dict__.update(before.__dict__)  # statements prepared so far, and the user's threshold
        self.route = route
        self._number = 0

    def name(self, content: bytes) -> bytes:
        """A name that is new on this connection. Without the number, a statement that is deallocated late (after an
        error) or never (in a broken transaction) would be confused with the one prepared since."""
        self._number += 1
        return b"%b_%d" % (content, self._number)

    def get(self, query: Any, prepare: bool | None = None) -> tuple[Prepare, bytes]:
        """Called by psycopg before each statement: whether it is or should be prepared, and under which name."""
        if not self.route.prepares:
            return _NO
        if (
            prepare is not False
            and self.prepare_threshold is not None
            and (known := self._names.get((query.query, query.types)))
        ):
            return _YES, known  # psycopg's answer in less time: called before each statement
        found, name = super().get(query, prepare)
        if found is Prepare.SHOULD:
            if self._to_flush:
                return _NO  # a pending DEALLOCATE, sent after this statement, would include it
            name = self.name(name_prefix(*self.key(query)))
        return found, name

    def clear(self) -> bool:
        if self.route.prepares:
            return super().clear()
        self._counts.clear()
        self._names.clear()
        self._to_flush.clear()  # DEALLOCATE would reach a session that another client uses by now
        return False

    def maintain_gen(self, conn: Any) -> PQGen[None]:
        # Called by psycopg after each statement; nearly always there is nothing to do, so no generator is made.
        return self._maintain(conn) if self._to_flush else _NOTHING

    def _maintain(self, conn: Any) -> PQGen[None]:
        if not self.route.prepares:
            self._to_flush.clear()
        try:
            yield from super().maintain_gen(conn)
        except errors.InvalidSqlStatementName as error:
            # Already deallocated, which is as good. The statement before this has run: a caller that saw this error
            # would attribute it to that statement and run it again.
            self.route.disable(error)
            if conn.pgconn.transaction_status == TransactionStatus.INERROR:
                raise


@lru_cache(maxsize=1000)
def name_prefix(sql: bytes, types: tuple[int, ...]) -> bytes:
    """The part of a name that identifies its statement. PostgreSQL compares 63 bytes of a name; this leaves 21."""
    return b"queueapp_" + hashlib.sha256(b"%b\0%b" % (sql, repr(types).encode())).hexdigest()[:32].encode()


def use_stable_names(raw: psycopg.Connection[Any]) -> StatementNames:
    """Use names by content on this connection from now on. The caller holds the connection's lock."""
    names = raw._prepared
    pgconn = raw.pgconn
    if not isinstance(names, StatementNames):
        address = (pgconn.host, pgconn.port, pgconn.user, pgconn.db)
        route = _routes.get(address)
        if route is None:
            shown = f"{pgconn.db.decode()!r} at {pgconn.host.decode()}:{pgconn.port.decode()}"
            route = _routes.setdefault(address, ServerRoute(shown))
        names = raw._prepared = StatementNames(names, route)
    if names.prepare_threshold is None:
        # Without a threshold psycopg ignores prepare=True, and ignores DISCARD ALL and ALTER. This one is never
        # reached: other statements on the connection are the user's, and are prepared only at the user's request.
        names.prepare_threshold = sys.maxsize
    if (
        names.route.prepares is None
        and pgconn.pipeline_status == PipelineStatus.OFF
        and pgconn.transaction_status in (TransactionStatus.IDLE, TransactionStatus.INTRANS)
    ):
        _probe(raw, names.route)
    return names


def disable_names(raw: psycopg.Connection[Any], error: psycopg.Error) -> bool:
    """After a statement met one of ``NAME_CONFLICTS``: prepare no more on this route; where a table was altered,
    prepare again on this connection. Returns whether the statement can simply run again: it was outside of a
    transaction."""
    names = raw._prepared
    if not isinstance(names, StatementNames):
        return False  # no statement of ours was prepared
    if not isinstance(error, errors.FeatureNotSupported):
        names.route.disable(error)
    elif error.diag.source_function != _ALTERED:
        return False
    names.clear()
    return raw.pgconn.transaction_status == TransactionStatus.IDLE


def _probe(raw: psycopg.Connection[Any], route: ServerRoute) -> None:
    """Probe whether statements may be prepared on this connection's route."""
    pgconn = raw.pgconn
    # No table is read; safe: it changes nothing. The server reports at the start of a session which of its processes
    # serves it; a pooler reports a value of its own, because the process changes.
    pgconn.send_query_params(b"SELECT pg_backend_pid()", None)
    if int(_answer(raw).get_value(0, 0) or b"0") == pgconn.backend_pid:
        return route.record(None)
    if not capabilities.has_send_close_prepared():
        return route.record("a connection pooler is in between, and the local libpq is older than 17")
    if pgconn.transaction_status == TransactionStatus.INTRANS:
        return _probe_name(raw, route)
    try:
        # In a transaction: otherwise each query might reach another session.
        pgconn.send_query(b"BEGIN")
        _answer(raw)
        with contextlib.suppress(psycopg.Error):
            _probe_name(raw, route)
        pgconn.send_query(b"ROLLBACK")
        _answer(raw)
    except BaseException:
        raw.close()  # an unnoticed open transaction would swallow later statements
        raise


def _probe_name(raw: psycopg.Connection[Any], route: ServerRoute) -> None:
    try:
        passed_on = _passes_names_on(raw, raw.pgconn)
    except psycopg.Error as error:
        if error.sqlstate is not None:  # otherwise the connection was lost, which is no answer
            route.record(f"the connection pooler in between does not support them ({error})")
        raise
    route.record("a connection pooler in between passes names on unchanged" if passed_on else None)


def _passes_names_on(raw: psycopg.Connection[Any], pgconn: PGconn) -> bool:
    """Whether the session knows a statement under the name that this client gave it. A pooler that supports prepared
    statements gives them names of its own, and prepares them on each session that it assigns."""
    name = b"queueapp_probe_%b" % uuid.uuid4().hex.encode()
    # No table is read; safe: a unique name, in one transaction, closed at its end.
    pgconn.send_prepare(name, b"SELECT count(*) FROM pg_prepared_statements WHERE name = $1", [_TEXT_OID])
    _answer(raw)
    pgconn.send_query_prepared(name, [name])
    known = _answer(raw).get_value(0, 0)
    pgconn.send_close_prepared(name)
    _answer(raw)
    return known != b"0"


def _answer(raw: psycopg.Connection[Any]) -> PGresult:
    result = raw.wait(results_of(raw.pgconn))[-1]
    if result.status not in (ExecStatus.COMMAND_OK, ExecStatus.TUPLES_OK):
        raise errors.error_from_result(result, encoding=raw.info.encoding)
    return result
