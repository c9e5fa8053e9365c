"""Statements whose parameters the caller packs, sent to libpq without a cursor: half the client's cost of one row.

A psycopg cursor takes 14 µs of Python around an INSERT that the server runs in 13 µs; a ``RawStatement`` takes 6 µs. It
is for statements that run once per message, and for claims. The wait is psycopg's own, so Ctrl-C interrupts it, and so
are the errors. ``IntegerArrayDumper`` packs the keys of an ack for an ordinary cursor.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
import struct
import sys
import threading
import uuid
from array import array
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache
from itertools import count
from typing import Any

import psycopg
from django.db import DataError
from psycopg import capabilities, errors
from psycopg._preparing import Prepare, PrepareManager
from psycopg.abc import AdaptContext, PQGen
from psycopg.adapt import Dumper, PyFormat
from psycopg.generators import execute as results_of
from psycopg.generators import fetch_many
from psycopg.pq import ExecStatus, Format, PipelineStatus, TransactionStatus
from psycopg.pq.abc import PGconn, PGresult
from psycopg.types.array import ListDumper
from psycopg.waiting import Wait

from ....conf import settings
from ...claims import MAX_SEQ
from ...message_columns import Kind

#: Parameters: oid and format, as psycopg sends them. A text has no type: the server gives it the type of its column.
UUID, TEXT, BYTES, BIGINT = (2950, Format.BINARY), (0, Format.TEXT), (17, Format.BINARY), (20, Format.BINARY)

#: Read for each result and each session: looking up a member of an enum takes ten times as long.
_COMMAND_OK, _TUPLES_OK, _SYNCED = ExecStatus.COMMAND_OK, ExecStatus.TUPLES_OK, ExecStatus.PIPELINE_SYNC
_IDLE, _INTRANS, _OFF = TransactionStatus.IDLE, TransactionStatus.INTRANS, PipelineStatus.OFF
_BINARY = Format.BINARY

_MARK = re.compile("%[%s]")


def _packed_text(value: str | None) -> bytes | None:
    if value is None:
        return None
    if "\0" in value:  # libpq would send the part before it
        raise DataError("A text cannot hold a NUL character.")
    return value.encode()


#: Type and packer of a message column, by its kind.
PACKERS: Mapping[Kind, tuple[tuple[int, Format], Callable[[Any], bytes | None]]] = {
    Kind.TEXT: (TEXT, _packed_text),
    Kind.INT16: (TEXT, lambda value: None if value is None else b"%d" % value),
    Kind.INT64: (TEXT, lambda value: None if value is None else b"%d" % value),
    Kind.BOOL: (TEXT, lambda value: None if value is None else b"t" if value else b"f"),
    Kind.TIME: (BIGINT, lambda value: None if value is None else value.to_bytes(8, "big", signed=True)),
}


def _text_array(values: Sequence[Any]) -> bytes:
    escaped = (str(value).replace("\\", "\\\\").replace('"', '\\"') for value in values)
    return ("{" + ",".join(f'"{value}"' for value in escaped) + "}").encode()


def pack_params(params: Sequence[Any]) -> list[bytes]:
    """Pack the parameters of a claim: UUIDs, integers, texts, and lists as text arrays."""
    return [
        value.bytes if isinstance(value, uuid.UUID)
        else value.encode() if isinstance(value, str)
        else _text_array(value) if isinstance(value, list)
        else int(value).to_bytes(8, "big", signed=True)
        for value in params
    ]  # fmt: skip


def numbered(sql: str) -> str:
    """A statement in cursor style (``%s``, ``%%``) in the server's style (``$1`` to ``$n``, ``%``)."""
    numbers = count(1)  # a name may hold ``%%s``
    return _MARK.sub(lambda found: f"${next(numbers)}" if found[0] == "%s" else "%", sql)


def count_params(sql: str) -> int:
    """The number of parameters of a statement in cursor style."""
    return _MARK.findall(sql).count("%s")


class RawStatement:
    """One statement in cursor style; prepared once per connection."""

    __slots__ = ("_content", "_formats", "_key", "_sql", "_types")

    def __init__(self, sql: str, parameters: Sequence[tuple[int, Format]]) -> None:
        self._sql = numbered(sql).encode()
        self._types = tuple(oid for oid, _ in parameters)
        self._formats = [format_ for _, format_ in parameters]  # psycopg 3.2 takes lists, of these and of the values
        self._key = (self._sql, self._types)
        self._content = name_prefix(*self._key)

    def execute(self, connection: Any, values: Sequence[bytes | None]) -> int:
        """Run it on a connection that ``can_run_raw``; returns the number of rows. Errors are ``django.db``'s."""
        return self.run(connection, values).command_tuples or 0

    def run(self, connection: Any, values: Sequence[bytes | None]) -> PGresult:
        """Run it and return its rows, in binary."""
        connection.validate_no_broken_transaction()
        raw = connection.connection
        with connection.wrap_database_errors, raw.lock:
            try:
                return self._run(raw, values)
            except NAME_CONFLICTS as error:
                # DISCARD ALL, or another server session behind a pooler. Nothing was executed, so outside of a
                # transaction it runs again, without a name.
                if not disable_names(raw, error):
                    raise
                return self._run(raw, values)

    def _run(self, raw: psycopg.Connection[Any], values: Sequence[bytes | None]) -> PGresult:
        pgconn = raw.pgconn
        name = self._prepared(raw) if settings.PREPARED_STATEMENTS else None
        if name is not None:
            pgconn.send_query_prepared(name, values, self._formats, _BINARY)
        else:
            pgconn.send_query_params(self._sql, values, self._types, self._formats, _BINARY)
        return _check(raw, raw.wait(results_of(pgconn)))

    def _prepared(self, raw: psycopg.Connection[Any]) -> bytes | None:
        """The name under which the statement is prepared on this connection; None where nothing is prepared. It is kept
        in psycopg's own list: after every rollback psycopg clears the list and sends DEALLOCATE ALL, which includes
        ours."""
        known = raw._prepared
        if isinstance(known, StatementNames) and known.route.prepares:
            name = known._names.get(self._key)
            if name is not None:
                return name
        known = use_stable_names(raw)
        if not known.route.prepares:
            return None
        if known._to_flush:
            raw.wait(known.maintain_gen(raw))  # a pending DEALLOCATE ALL
        name = known.name(self._content)
        raw.pgconn.send_prepare(name, self._sql, self._types)
        _check(raw, raw.wait(results_of(raw.pgconn)))
        known._names[self._key] = name
        return name


class OpeningQuery(RawStatement):
    """A query that opens its transaction: BEGIN is sent with it, in one round trip.

    A receive of one message in a transaction of its own is BEGIN, DELETE, COMMIT; this saves one round trip and half of
    the client's work (psycopg's own pipeline mode costs what it saves).
    """

    __slots__ = ()

    def fetch(self, connection: Any, values: Sequence[bytes | None]) -> PGresult | None:
        """Run BEGIN and the query on a connection that ``can_open_transaction``. None: it cannot be prepared, and
        nothing was executed. Errors are ``django.db``'s."""
        connection.validate_no_broken_transaction()
        raw = connection.connection
        with connection.wrap_database_errors, raw.lock:
            try:
                name = self._prepared(raw)
            except NAME_CONFLICTS as taken:
                disable_names(raw, taken)
                name = None
            if name is None:
                return None
            result = _failed_or_last(self._converse(raw, (b"BEGIN",), name, values))
            if result.status != _TUPLES_OK:
                error = errors.error_from_result(result, encoding=raw.info.encoding)
                if not isinstance(error, NAME_CONFLICTS):
                    raise error
                # The session does not know the name. The transaction contains only this query, so it can begin again.
                disable_names(raw, error)
                raw.pgconn.send_query(b"ROLLBACK")
                _check(raw, raw.wait(results_of(raw.pgconn)))
                return None
            return result

    def may_follow(self, connection: Any) -> bool:
        """Whether ``follow`` may run now: in an intact transaction without pending maintenance."""
        raw = connection.connection
        known = raw._prepared
        return (
            raw.pgconn.transaction_status == _INTRANS
            and raw.pgconn.pipeline_status == _OFF
            and raw.isolation_level is raw.read_only is raw.deferrable is None
            and not known._to_flush
            and self._key in known._names
            and not (raw._num_transactions or raw._tpc)
        )

    def follow(self, connection: Any, values: Sequence[bytes | None]) -> PGresult | None:
        """Run COMMIT, BEGIN and the query in one round trip on a connection for which ``may_follow`` is true. None: the
        transaction is committed and the query has failed; the next claim will report the error. Errors are
        ``django.db``'s: of the commit, so that nothing was executed, or of a lost connection."""
        raw = connection.connection
        with connection.wrap_database_errors, raw.lock:
            name = raw._prepared._names[self._key]
            results = self._converse(raw, (b"COMMIT", b"BEGIN"), name, values)
            result = results[-1]
            if result.status == _TUPLES_OK:
                return result
            if results[0].status != _COMMAND_OK:
                raise errors.error_from_result(results[0], encoding=raw.info.encoding)
            result = _failed_or_last(results)
            error = errors.error_from_result(result, encoding=raw.info.encoding)
            if isinstance(error, NAME_CONFLICTS):
                disable_names(raw, error)
            raw.pgconn.send_query(b"ROLLBACK")
            raw.wait(results_of(raw.pgconn))
            return None

    def _converse(
        self, raw: psycopg.Connection[Any], before: Sequence[bytes], name: bytes, values: Sequence[bytes | None]
    ) -> list[PGresult]:
        """The results of the statements ``before`` and of the query. After a failure the server skips the rest."""
        try:
            return raw.wait(self._conversation(raw.pgconn, before, name, values))
        except BaseException:
            raw.close()  # the state of an interrupted pipeline is unknown; the server rolls back
            raise

    def _conversation(
        self, pgconn: PGconn, before: Sequence[bytes], name: bytes, values: Sequence[bytes | None]
    ) -> PQGen[list[PGresult]]:
        pgconn.enter_pipeline_mode()
        for statement in before:
            pgconn.send_query_params(statement, None)
        pgconn.send_query_prepared(name, values, self._formats, _BINARY)
        return (yield from answers(pgconn))


def answers(pgconn: PGconn) -> PQGen[list[PGresult]]:
    """End the pipeline and return its results. After a failed statement the server skips the rest."""
    pgconn.pipeline_sync()
    while pgconn.flush():
        yield Wait.W
    results: list[PGresult] = []
    while True:
        # All results of one statement; only a lost connection returns none.
        found = yield from fetch_many(pgconn)
        if not found:
            raise psycopg.OperationalError("the connection was lost in the middle of a round trip")
        results += found
        if found[-1].status == _SYNCED:
            break
    pgconn.exit_pipeline_mode()
    return results[:-1]


class LockedQuery(OpeningQuery):
    """A query under an advisory lock of its transaction. The lock is sent before it, as a statement of its own: the
    query's snapshot is taken once the lock is held. Outside of a transaction both form one, which ends with the query,
    and for which the server settings ``options`` are set: constants of ours, since they become part of a text."""

    __slots__ = ("_options",)

    def __init__(
        self, sql: str, parameters: Sequence[tuple[int, Format]], options: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(sql, parameters)
        self._options = "".join(
            f", set_config('{name}', '{value}', true)" for name, value in (options or {}).items()
        ).encode()

    def fetch_locked(self, connection: Any, lock: int, values: Sequence[bytes | None]) -> PGresult | None:
        """Run both on a connection that ``can_run_raw``. None: the query cannot be prepared, and nothing was executed.
        Errors are ``django.db``'s."""
        connection.validate_no_broken_transaction()
        raw = connection.connection
        with connection.wrap_database_errors, raw.lock:
            try:
                name = self._prepared(raw)
            except NAME_CONFLICTS as taken:
                if not disable_names(raw, taken):
                    raise
                name = None
            if name is None:
                return None
            # No table: see ``PostgresqlLimits.lock``. Only an integer of ours is written into the text.
            locking = b"SELECT pg_advisory_xact_lock(%d::bigint)" % lock
            if raw.pgconn.transaction_status == _IDLE:
                locking += self._options
            result = _failed_or_last(self._converse(raw, (locking,), name, values))
            if result.status != _TUPLES_OK:
                error = errors.error_from_result(result, encoding=raw.info.encoding)
                if isinstance(error, NAME_CONFLICTS) and disable_names(raw, error):
                    return None
                raise error
            return result


def _failed_or_last(results: Sequence[PGresult]) -> PGresult:
    return next((result for result in results if result.status == ExecStatus.FATAL_ERROR), results[-1])


def can_open_transaction(connection: Any) -> bool:
    """Whether an ``OpeningQuery`` may run now: autocommit is off, no transaction is open, and BEGIN has no options."""
    raw = connection.connection
    return (
        raw is not None
        and (connection.health_check_done or not connection.health_check_enabled)
        and not raw.autocommit
        and settings.PREPARED_STATEMENTS
        and _is_utf8(raw)
        and raw.isolation_level is raw.read_only is raw.deferrable is None
        and raw.pgconn.transaction_status == _IDLE
        and raw.pgconn.pipeline_status == _OFF
    )


def can_run_raw(connection: Any) -> bool:
    """Whether a raw statement may run now. Not as the first of a transaction, which psycopg opens with the first
    statement of a cursor; not in a pipeline; not on a connection that is not open yet or that Django has to check."""
    raw = connection.connection
    if raw is None or (connection.health_check_enabled and not connection.health_check_done):
        return False
    status = raw.pgconn.transaction_status
    may = status == _INTRANS or (status == _IDLE and raw.autocommit)
    return may and raw.pgconn.pipeline_status == _OFF and _is_utf8(raw)  # type: ignore[no-any-return]


def _is_utf8(raw: psycopg.Connection[Any]) -> bool:
    """Django's sessions are, unless user code changed it; then a cursor converts."""
    return raw.pgconn.parameter_status(b"client_encoding") == b"UTF8"


def _check(raw: psycopg.Connection[Any], results: list[PGresult]) -> PGresult:
    result = results[-1]
    if result.status not in (_COMMAND_OK, _TUPLES_OK):
        raise errors.error_from_result(result, encoding=raw.info.encoding)
    return result


# -- arrays of integers --------------------------------------------------------------------------------------

_BIGINT, _BIGINT_ARRAY = 20, 1016
#: Dimensions, has NULLs, item type, length, lower bound.
_HEAD = struct.Struct(">iiIii").pack
#: An item: its length and its bytes.
_ITEM = b"\0\0\0\x08" + bytes(8)


class IntegerArrayDumper(Dumper):
    """psycopg's dumper of lists, except for lists of integers, which are packed at once.

    psycopg writes an array as text, item by item: 330 µs for the 500 keys of an ack, holding the interpreter lock, a
    seventh of the worker's time per message. Packed at once they take 30 µs, and the server need not parse them. All
    are ``bigint[]``, so that a statement is prepared once and not for each size of integers.
    """

    format = Format.BINARY
    oid = _BIGINT_ARRAY

    def __init__(self, cls: type, context: AdaptContext | None = None) -> None:
        super().__init__(cls, context)
        self._list_dumper = ListDumper(cls, context)

    def get_key(self, obj: list[Any], format: PyFormat) -> Any:
        """The key under which psycopg caches the dumper of such a list."""
        if set(map(type, obj)) == {int} and min(obj) >= -MAX_SEQ and max(obj) <= MAX_SEQ:
            return self.cls
        compared: Hashable = self._list_dumper.get_key(obj, format)
        return self.cls, compared

    def upgrade(self, obj: list[Any], format: PyFormat) -> Dumper:
        """The dumper of any other list."""
        return self._list_dumper.upgrade(obj, format)

    def dump(self, obj: list[int]) -> bytes:
        """The array as PostgreSQL's ``array_send`` would write it."""
        count = len(obj)
        numbers = array("q", obj)
        if sys.byteorder == "little":
            numbers.byteswap()
        bytes_of = numbers.tobytes()
        items = bytearray(_ITEM * count)
        for place in range(8):
            items[4 + place :: 12] = bytes_of[place::8]
        return _HEAD(1, 0, _BIGINT, count, 1) + items


# -- the names of prepared statements, and whether statements are prepared at all: a connection pooler affects both ----
#
# psycopg numbers its names from 0 in every process. Where a pooler passes server sessions from one client to the next,
# such a name may denote a statement of another process: an INSERT lands in another queue's table, without an error. So
# each name contains the hash of its statement: it denotes that statement or nothing. Behind such a pooler names are
# missing or taken unpredictably, which breaks the transaction. So each process probes once per database whether there
# is one; in that case, or at the first name that is missing or taken all the same, it prepares nothing any more.


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


def forget_routes() -> None:
    """Detect anew how each server is reached (tests)."""
    _routes.clear()


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
