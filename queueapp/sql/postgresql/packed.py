"""A statement whose parameters the caller has packed, sent to libpq without a cursor: half the client's cost of one row.

A psycopg cursor takes 14 µs of Python around an INSERT that the server runs in 13; this takes 6. It is for statements
of which there is one per message, and for claims. The wait is psycopg's own, so a Ctrl-C ends it, and so are the errors.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

import psycopg
from django.db import DataError
from psycopg import errors
from psycopg.abc import PQGen
from psycopg.generators import execute as results_of
from psycopg.generators import fetch_many
from psycopg.pq import ExecStatus, Format, PipelineStatus, TransactionStatus
from psycopg.pq.abc import PGconn, PGresult
from psycopg.waiting import Wait

from ...conf import settings
from ..message_columns import Kind
from .naming import SIGNS, StatementNames, content_of, distrust, take_over

#: Parameters: oid and format, as psycopg sends them. A text has no type of its own: it becomes what its column is.
UUID, TEXT, BYTES, BIGINT = (2950, Format.BINARY), (0, Format.TEXT), (17, Format.BINARY), (20, Format.BINARY)

#: What is asked of each answer and each session: a member of an enum takes ten times as long to be found.
_COMMAND_OK, _TUPLES_OK, _SYNCED = ExecStatus.COMMAND_OK, ExecStatus.TUPLES_OK, ExecStatus.PIPELINE_SYNC
_IDLE, _INTRANS, _OFF = TransactionStatus.IDLE, TransactionStatus.INTRANS, PipelineStatus.OFF
_BINARY = Format.BINARY

_MARK = re.compile("%[%s]")


def _packed_text(value: str | None) -> bytes | None:
    if value is None:
        return None
    if "\0" in value:  # libpq would send what is before it
        raise DataError("A text cannot hold a NUL character.")
    return value.encode()


#: What an option of a message is sent as, by its kind.
PACKED: Mapping[Kind, tuple[tuple[int, Format], Callable[[Any], bytes | None]]] = {
    Kind.TEXT: (TEXT, _packed_text),
    Kind.INT16: (TEXT, lambda value: None if value is None else b"%d" % value),
    Kind.INT64: (TEXT, lambda value: None if value is None else b"%d" % value),
    Kind.BOOL: (TEXT, lambda value: None if value is None else b"t" if value else b"f"),
    Kind.TIME: (BIGINT, lambda value: None if value is None else value.to_bytes(8, "big", signed=True)),
}


def _text_array(values: Sequence[Any]) -> bytes:
    escaped = (str(value).replace("\\", "\\\\").replace('"', '\\"') for value in values)
    return ("{" + ",".join(f'"{value}"' for value in escaped) + "}").encode()


def packed(params: Sequence[Any]) -> list[bytes]:
    """Parameters of a claim, as a cursor takes them: keys and owners, integers, and lists as texts."""
    return [
        one.bytes if isinstance(one, uuid.UUID)
        else _text_array(one) if isinstance(one, list)
        else int(one).to_bytes(8, "big", signed=True)
        for one in params
    ]  # fmt: skip


def numbered(sql: str) -> str:
    """A statement of a cursor's, with ``%s`` and ``%%``, as the server takes it: with ``$1`` to ``$n`` and ``%``."""
    numbers = count(1)  # a name may hold ``%%s``
    return _MARK.sub(lambda found: f"${next(numbers)}" if found[0] == "%s" else "%", sql)


def marks_in(sql: str) -> int:
    """How many parameters such a statement has."""
    return _MARK.findall(sql).count("%s")


class PackedStatement:
    """One statement, its parameters marked as for a cursor; prepared once per connection."""

    __slots__ = ("_content", "_formats", "_key", "_sql", "_types")

    def __init__(self, sql: str, parameters: Sequence[tuple[int, Format]]) -> None:
        self._sql = numbered(sql).encode()
        self._types = tuple(oid for oid, _ in parameters)
        self._formats = [format_ for _, format_ in parameters]  # psycopg 3.2 takes lists, of these and of the values
        self._key = (self._sql, self._types)
        self._content = content_of(*self._key)

    def execute(self, connection: Any, values: Sequence[bytes | None]) -> int:
        """Run it on a connection that is ``ready``; returns how many rows it touched. Errors are ``django.db``'s."""
        return self.run(connection, values).command_tuples or 0

    def run(self, connection: Any, values: Sequence[bytes | None]) -> PGresult:
        """The same; returns the rows, if it has any, in binary."""
        connection.validate_no_broken_transaction()
        raw = connection.connection
        with connection.wrap_database_errors, raw.lock:
            try:
                return self._run(raw, values)
            except SIGNS as error:
                # DISCARD ALL, or another server session behind a pooler. Nothing was done, so outside of a transaction
                # it is done now, without a name.
                if not distrust(raw, error):
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
        """The name under which the statement is prepared on this connection; None where nothing is. It is kept in
        psycopg's own list: after every rollback psycopg empties that and says DEALLOCATE ALL, which takes ours as well."""
        known = raw._prepared
        if isinstance(known, StatementNames) and known.route.prepares:
            name = known._names.get(self._key)
            if name is not None:
                return name
        known = take_over(raw)
        if not known.route.prepares:
            return None
        if known._to_flush:
            raw.wait(known.maintain_gen(raw))  # that DEALLOCATE ALL, if it is still to come
        name = known.name(self._content)
        raw.pgconn.send_prepare(name, self._sql, self._types)
        _check(raw, raw.wait(results_of(raw.pgconn)))
        known._names[self._key] = name
        return name


class OpeningQuery(PackedStatement):
    """A query that opens its transaction: BEGIN travels with it, and both are waited for once.

    A receive of one message in a transaction of its own is BEGIN, DELETE, COMMIT; this is one trip less, and half of the
    client's work (psycopg's own pipeline costs what it saves).
    """

    __slots__ = ()

    def fetch(self, connection: Any, values: Sequence[bytes | None]) -> PGresult | None:
        """Run BEGIN and the query on a connection that is ``ready_to_open``; None, and nothing was done, where it cannot be
        prepared. Errors are ``django.db``'s."""
        connection.validate_no_broken_transaction()
        raw = connection.connection
        with connection.wrap_database_errors, raw.lock:
            try:
                name = self._prepared(raw)
            except SIGNS as taken:
                distrust(raw, taken)
                name = None
            if name is None:
                return None
            result = _failed_or_last(self._converse(raw, (b"BEGIN",), name, values))
            if result.status != _TUPLES_OK:
                error = errors.error_from_result(result, encoding=raw.info.encoding)
                if not isinstance(error, SIGNS):
                    raise error
                # The session does not know the name. Nothing but this was in the transaction, so it may be begun again.
                distrust(raw, error)
                raw.pgconn.send_query(b"ROLLBACK")
                _check(raw, raw.wait(results_of(raw.pgconn)))
                return None
            return result

    def may_follow(self, connection: Any) -> bool:
        """Whether ``follow`` may run now: in a transaction that is whole, and nothing is left to be done before."""
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
        """Run COMMIT, BEGIN and the query, waited for once, on a connection of which ``may_follow`` is true. None: the
        transaction is committed and the query has failed, which the next one will say. Errors are ``django.db``'s: of the
        commit, so that nothing was done, or of a connection that is lost."""
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
            if isinstance(error, SIGNS):
                distrust(raw, error)
            raw.pgconn.send_query(b"ROLLBACK")
            raw.wait(results_of(raw.pgconn))
            return None

    def _converse(
        self, raw: psycopg.Connection[Any], before: Sequence[bytes], name: bytes, values: Sequence[bytes | None]
    ) -> list[PGresult]:
        """The results of the statements ``before`` and of the query. One that fails skips those behind it."""
        try:
            return raw.wait(self._conversation(raw.pgconn, before, name, values))
        except BaseException:
            raw.close()  # in the middle of a pipeline nobody knows what the server does with it; it rolls back
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
    """End the pipeline: the results of what was sent in it. A statement that fails skips those behind it."""
    pgconn.pipeline_sync()
    while pgconn.flush():
        yield Wait.W
    results: list[PGresult] = []
    while True:
        # All of one statement; nothing is only said by a connection that is gone.
        found = yield from fetch_many(pgconn)
        if not found:
            raise psycopg.OperationalError("the connection was lost in the middle of a trip")
        results += found
        if found[-1].status == _SYNCED:
            break
    pgconn.exit_pipeline_mode()
    return results[:-1]


class LockedQuery(OpeningQuery):
    """A query under an advisory lock of its transaction. The lock travels before it, as a statement of its own: the query's
    snapshot is taken when the lock is had. Outside of a transaction both are one, which ends with the query, and for which
    ``options`` of the server are set: constants of ours, as they become part of a text."""

    __slots__ = ("_options",)

    def __init__(
        self, sql: str, parameters: Sequence[tuple[int, Format]], options: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(sql, parameters)
        self._options = "".join(
            f", set_config('{name}', '{value}', true)" for name, value in (options or {}).items()
        ).encode()

    def fetch_locked(self, connection: Any, lock: int, values: Sequence[bytes | None]) -> PGresult | None:
        """Run both on a connection that is ``ready``; None, and nothing was done, where the query cannot be prepared. Errors
        are ``django.db``'s."""
        connection.validate_no_broken_transaction()
        raw = connection.connection
        with connection.wrap_database_errors, raw.lock:
            try:
                name = self._prepared(raw)
            except SIGNS as taken:
                if not distrust(raw, taken):
                    raise
                name = None
            if name is None:
                return None
            # No table: see ``PostgresqlFlowing.lock_flow``. Nothing but an integer of ours is written into the text.
            locking = b"SELECT pg_advisory_xact_lock(%d::bigint)" % lock
            if raw.pgconn.transaction_status == _IDLE:
                locking += self._options
            result = _failed_or_last(self._converse(raw, (locking,), name, values))
            if result.status != _TUPLES_OK:
                error = errors.error_from_result(result, encoding=raw.info.encoding)
                if isinstance(error, SIGNS) and distrust(raw, error):
                    return None
                raise error
            return result


def _failed_or_last(results: Sequence[PGresult]) -> PGresult:
    return next((one for one in results if one.status == ExecStatus.FATAL_ERROR), results[-1])


def ready_to_open(connection: Any) -> bool:
    """Whether an ``OpeningQuery`` may run now: a transaction is wanted and not begun, with the server's own settings."""
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


def ready(connection: Any) -> bool:
    """Whether a packed statement may run now. Not as the first of a transaction, which psycopg opens with the first
    statement of a cursor; not in a pipeline; not on a connection that is still to be opened, or to be checked by Django."""
    raw = connection.connection
    if raw is None or (connection.health_check_enabled and not connection.health_check_done):
        return False
    status = raw.pgconn.transaction_status
    may = status == _INTRANS or (status == _IDLE and raw.autocommit)
    return may and raw.pgconn.pipeline_status == _OFF and _is_utf8(raw)  # type: ignore[no-any-return]


def _is_utf8(raw: psycopg.Connection[Any]) -> bool:
    """Django's sessions are, but for those in which the user has changed it; a cursor heeds that."""
    return raw.pgconn.parameter_status(b"client_encoding") == b"UTF8"


def _check(raw: psycopg.Connection[Any], results: list[PGresult]) -> PGresult:
    result = results[-1]
    if result.status not in (_COMMAND_OK, _TUPLES_OK):
        raise errors.error_from_result(result, encoding=raw.info.encoding)
    return result
