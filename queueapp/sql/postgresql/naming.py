"""Under which names statements are prepared, and where they are prepared at all: what a connection pooler does to both.

psycopg counts its names from 0 in every process. Where a pooler hands server sessions from one client to the next, such a
name is whatever another process has prepared under it: an INSERT lands in another queue's table, without an error. So a
name holds the hash of its statement: it means that statement or nothing. And as names are missing or taken there by turns,
which is the end of a transaction, it is found out once per process and database whether there is such a pooler; then, or at
the first name that is missing or taken all the same, nothing is prepared any more.
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

#: What a statement meets whose name the session does not know (26000), or knows already (42P05); or whose rows have other
#: columns since it was prepared (0A000), because another session has altered the table.
SIGNS = (errors.InvalidSqlStatementName, errors.DuplicatePreparedStatement, errors.FeatureNotSupported)
#: Where the server says the last of these; it says it in its own language.
_ALTERED = "RevalidateCachedQuery"

_TEXT_OID = 25
_YES, _NO = Prepare.YES, (Prepare.NO, b"")
_NOTHING: Any = ()


class Route:
    """What is known of the way from this process to one database, from all of its connections."""

    __slots__ = ("_database", "_lock", "prepares")

    def __init__(self, database: str) -> None:
        self._database = database
        self._lock = threading.Lock()
        #: Whether statements may be prepared. None: nobody has looked yet, so none is.
        self.prepares: bool | None = None

    def found(self, why_not: str | None) -> None:
        """The outcome of a look, which cannot take back what a sign has shown meanwhile."""
        with self._lock:
            if self.prepares is None:
                self.prepares = why_not is None
                if why_not is not None:
                    self._say(why_not)

    def distrust(self, error: psycopg.Error) -> None:
        """A sign was seen: prepare no more."""
        with self._lock:
            if self.prepares:
                self.prepares = False
                self._say(str(error).strip())

    def _say(self, why_not: str) -> None:
        log.warning(
            "Nothing is prepared on database %s by this process, which makes single messages slower: %s. Let a pooler keep "
            "prepared statements (PgBouncer 1.22: max_prepared_statements), or set QUEUEAPP.PREPARED_STATEMENTS to False.",
            self._database,
            why_not,
        )


_routes: dict[tuple[bytes, ...], Route] = {}


class StatementNames(PrepareManager):
    """psycopg's list of what is prepared on one connection, with names by content; for the user's statements as well."""

    def __init__(self, before: PrepareManager, route: Route) -> None:
        super().__init__()
        self.__dict__.update(before.__dict__)  # what the user has prepared so far, and the user's threshold
        self.route = route
        self._number = 0

    def name(self, content: bytes) -> bytes:
        """A name that this connection has not had. Without a number, what is deallocated late (after an error in between)
        or never (in a transaction that was broken) would be taken for what has been prepared anew since."""
        self._number += 1
        return b"%b_%d" % (content, self._number)

    def get(self, query: Any, prepare: bool | None = None) -> tuple[Prepare, bytes]:
        """psycopg's question before each statement: is it prepared, or should it be, and under which name."""
        if not self.route.prepares:
            return _NO
        if (
            prepare is not False
            and self.prepare_threshold is not None
            and (known := self._names.get((query.query, query.types)))
        ):
            return _YES, known  # as psycopg answers, in less time: this is asked before each statement
        found, name = super().get(query, prepare)
        if found is Prepare.SHOULD:
            if self._to_flush:
                return _NO  # a DEALLOCATE that is still to come, after this statement, would take it along
            name = self.name(content_of(*self.key(query)))
        return found, name

    def clear(self) -> bool:
        if self.route.prepares:
            return super().clear()
        self._counts.clear()
        self._names.clear()
        self._to_flush.clear()  # DEALLOCATE would reach a session that is somebody else's by now
        return False

    def maintain_gen(self, conn: Any) -> PQGen[None]:
        # psycopg asks after each statement, and there is nearly always nothing: no generator for that.
        return self._maintain(conn) if self._to_flush else _NOTHING

    def _maintain(self, conn: Any) -> PQGen[None]:
        if not self.route.prepares:
            self._to_flush.clear()
        try:
            yield from super().maintain_gen(conn)
        except errors.InvalidSqlStatementName as error:
            # It is gone already, which is as good. The statement before this has been run: whoever met this error would
            # take it for that statement's and run it again.
            self.route.distrust(error)
            if conn.pgconn.transaction_status == TransactionStatus.INERROR:
                raise


@lru_cache(maxsize=1000)
def content_of(sql: bytes, types: tuple[int, ...]) -> bytes:
    """The part of a name that says which statement it is. PostgreSQL tells names apart by 63 bytes; this leaves 21."""
    return b"queueapp_" + hashlib.sha256(b"%b\0%b" % (sql, repr(types).encode())).hexdigest()[:32].encode()


def take_over(raw: psycopg.Connection[Any]) -> StatementNames:
    """Name by content what is prepared on this connection from now on. The caller holds the connection's lock."""
    names = raw._prepared
    pgconn = raw.pgconn
    if not isinstance(names, StatementNames):
        address = (pgconn.host, pgconn.port, pgconn.user, pgconn.db)
        route = _routes.get(address)
        if route is None:
            shown = f"{pgconn.db.decode()!r} at {pgconn.host.decode()}:{pgconn.port.decode()}"
            route = _routes.setdefault(address, Route(shown))
        names = raw._prepared = StatementNames(names, route)
    if names.prepare_threshold is None:
        # Without one psycopg ignores prepare=True, and heeds no DISCARD ALL or ALTER. This one is never reached: what else runs
        # on the connection is the user's, and is prepared only if the user says so.
        names.prepare_threshold = sys.maxsize
    if (
        names.route.prepares is None
        and pgconn.pipeline_status == PipelineStatus.OFF
        and pgconn.transaction_status in (TransactionStatus.IDLE, TransactionStatus.INTRANS)
    ):
        _look(raw, names.route)
    return names


def distrust(raw: psycopg.Connection[Any], error: psycopg.Error) -> bool:
    """A statement met one of the ``SIGNS`` on this connection: prepare no more, on none that goes the same way; where a table
    was altered, prepare anew on this one. Returns whether it can simply be run again: it was outside of a transaction."""
    names = raw._prepared
    if not isinstance(names, StatementNames):
        return False  # nothing of ours was prepared
    if not isinstance(error, errors.FeatureNotSupported):
        names.route.distrust(error)
    elif error.diag.source_function != _ALTERED:
        return False
    names.clear()
    return raw.pgconn.transaction_status == TransactionStatus.IDLE


def _look(raw: psycopg.Connection[Any], route: Route) -> None:
    """Find out whether statements may be prepared on the way that this connection goes."""
    pgconn = raw.pgconn
    # No table is read; safe: it changes nothing. The server itself says at the start of a session which of its processes
    # has it; a pooler says something of its own, because tomorrow it is another one.
    pgconn.send_query_params(b"SELECT pg_backend_pid()", None)
    if int(_answer(raw).get_value(0, 0) or b"0") == pgconn.backend_pid:
        return route.found(None)
    if not capabilities.has_send_close_prepared():
        return route.found("there is a connection pooler in between, and the libpq here is older than 17")
    if pgconn.transaction_status == TransactionStatus.INTRANS:
        return _look_for_a_name(raw, route)
    try:
        # In a transaction, or each question would be put to another session.
        pgconn.send_query(b"BEGIN")
        _answer(raw)
        with contextlib.suppress(psycopg.Error):
            _look_for_a_name(raw, route)
        pgconn.send_query(b"ROLLBACK")
        _answer(raw)
    except BaseException:
        raw.close()  # a transaction that nobody knows of would swallow what follows
        raise


def _look_for_a_name(raw: psycopg.Connection[Any], route: Route) -> None:
    try:
        passed_on = _is_passed_on(raw, raw.pgconn)
    except psycopg.Error as error:
        if error.sqlstate is not None:  # else the connection was lost, which says nothing
            route.found(f"the connection pooler in between does not know how ({error})")
        raise
    route.found("there is a connection pooler in between that passes names on as they are" if passed_on else None)


def _is_passed_on(raw: psycopg.Connection[Any], pgconn: PGconn) -> bool:
    """Whether the session knows a statement by the name that was given to it here. A pooler that keeps prepared statements
    gives them names of its own, and prepares them wherever it sends a client."""
    name = b"queueapp_look_%b" % uuid.uuid4().hex.encode()
    # No table is read; safe: a name of nobody else's, in one transaction, taken back at its end.
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
