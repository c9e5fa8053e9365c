"""A statement that is planned without sorting or reading a table whole, in one trip: the settings travel with it, and are put
back with it.

What is prepared of it has a text of its own, and so a plan of its own, which was made under those settings and is made anew
under them: it may be kept, unlike the plan of the statement as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import psycopg
from psycopg import errors
from psycopg.abc import PQGen
from psycopg.adapt import PyFormat, Transformer
from psycopg.generators import execute as results_of
from psycopg.pq import ExecStatus, Format, PipelineStatus, TransactionStatus
from psycopg.pq.abc import PGresult

from ...conf import settings
from .naming import SIGNS, content_of, distrust, take_over
from .packed import answers, numbered
from .session import execute, fetch, hot_cursor, load


class _Off(NamedTuple):
    """What the planner is to do without: to the end of the transaction, which outside of one is the end of the trip."""

    #: Behind each text that is prepared under it.
    mark: str
    off: bytes
    remember_and_off: bytes
    put_back: bytes


def _without(mark: str, *settings: bytes) -> _Off:
    off = [b"set_config('%s', 'off', true)" % one for one in settings]
    remember = [b"set_config('queueapp.%s', current_setting('%s'), true)" % (one, one) for one in settings]
    put_back = [b"set_config('%s', current_setting('queueapp.%s'), true)" % (one, one) for one in settings]
    return _Off(mark, *(b"SELECT " + b", ".join(one) for one in (off, [*remember, *off], put_back)))


_UNSORTED = _without("unsorted", b"enable_sort", b"enable_seqscan")
#: What is found by its key may be sorted: it would rather be read by the index that has its order, all of it.
_BY_KEY = _without("by key", b"enable_seqscan")

#: A text, the parameters and their types and formats; psycopg 3.2 takes lists of them and nothing else.
_Statement = tuple[bytes, list[Any], tuple[int, ...], list[Format]]


def fetch_unsorted(connection: Any, sql: str, params: Sequence[Any]) -> list[Any]:
    """As ``session.fetch``: the statement takes its order from an index, if there is one. In a transaction, which may be the
    user's, what was set is put back, by itself if the statement fails; outside of one nothing outlives the trip, since
    behind a pooler the session is somebody else's the moment after."""
    return _fetch(connection, sql, params, _UNSORTED)


def execute_unsorted(connection: Any, sql: str, params: Sequence[Any]) -> int:
    """As ``session.execute``, otherwise as ``fetch_unsorted``."""
    return _execute(connection, sql, params, _UNSORTED)


def fetch_by_key(connection: Any, sql: str, params: Sequence[Any]) -> list[Any]:
    """As ``fetch_unsorted``, of a statement that finds its rows by a key: it reads no table whole, and sorts if it likes."""
    return _fetch(connection, sql, params, _BY_KEY)


def execute_by_key(connection: Any, sql: str, params: Sequence[Any]) -> int:
    """As ``session.execute``, otherwise as ``fetch_by_key``."""
    return _execute(connection, sql, params, _BY_KEY)


def _fetch(connection: Any, sql: str, params: Sequence[Any], without: _Off) -> list[Any]:
    result = _run(connection, sql, params, without)
    if result is None:
        return fetch(connection, sql, params)
    return load(connection, result) if result.ntuples else []


def _execute(connection: Any, sql: str, params: Sequence[Any], without: _Off) -> int:
    result = _run(connection, sql, params, without)
    return execute(connection, sql, params) if result is None else result.command_tuples or 0


def _run(connection: Any, sql: str, params: Sequence[Any], without: _Off) -> PGresult | None:
    """None, and nothing was done: the user is in a pipeline, where no setting can be put back in time."""
    connection.validate_no_broken_transaction()
    cursor = hot_cursor(connection)
    raw = cursor.connection
    if raw.pgconn.pipeline_status != PipelineStatus.OFF:
        return None
    transformer = Transformer(cursor)
    values = list(transformer.dump_sequence(params, [PyFormat.AUTO] * len(params)))
    statement = (_marked(sql, without.mark), values, transformer.types or (), transformer.formats or [])
    with connection.wrap_database_errors, raw.lock:
        try:
            return _in_one_trip(raw, statement, without)
        except SIGNS as error:
            # As in ``packed``: nothing was done, and if nothing was broken by it, it is done now, without a name.
            if not distrust(raw, error):
                raise
            return _in_one_trip(raw, statement, without)


def _in_one_trip(raw: psycopg.Connection[Any], statement: _Statement, without: _Off) -> PGresult:
    # The statements of one trip are one transaction, also without a BEGIN.
    before, after = [without.off], []
    begin = b""
    if not raw.autocommit or raw.pgconn.transaction_status != TransactionStatus.IDLE:
        before, after = [without.remember_and_off], [without.put_back]
        if raw.pgconn.transaction_status == TransactionStatus.IDLE:
            begin = raw._get_tx_start_command()
    statements: list[_Statement] = [(sql, [], (), []) for sql in before]
    statements += [statement, *((sql, [], (), []) for sql in after)]
    names = [_prepared(raw, sql, types) for sql, _, types, _ in statements]
    try:
        results = raw.wait(_conversation(raw, begin, list(zip(names, statements, strict=True))))
    except BaseException:
        raw.close()  # in the middle of a pipeline nobody knows what the server does with it; it rolls back
        raise
    for result in results:
        if result.status not in (ExecStatus.COMMAND_OK, ExecStatus.TUPLES_OK):
            raise errors.error_from_result(result, encoding=raw.info.encoding)
    return results[len(results) - len(after) - 1]


def _conversation(
    raw: psycopg.Connection[Any], begin: bytes, statements: Sequence[tuple[bytes | None, _Statement]]
) -> PQGen[list[PGresult]]:
    pgconn = raw.pgconn
    pgconn.enter_pipeline_mode()
    if begin:
        pgconn.send_query_params(begin, None)
    for name, (sql, values, types, formats) in statements:
        if name is None:
            pgconn.send_query_params(sql, values, types, formats, Format.BINARY)
        else:
            pgconn.send_query_prepared(name, values, formats, Format.BINARY)
    return (yield from answers(pgconn))


def _prepared(raw: psycopg.Connection[Any], sql: bytes, types: tuple[int, ...]) -> bytes | None:
    """The name of a statement on this connection; None where nothing is prepared. In psycopg's own list, as in ``packed``."""
    if not settings.PREPARED_STATEMENTS:
        return None
    known = take_over(raw)
    if not known.route.prepares:
        return None
    name = known._names.get((sql, types))
    if name is None:
        if known._to_flush:
            raw.wait(known.maintain_gen(raw))
        name = known.name(content_of(sql, types))
        raw.pgconn.send_prepare(name, sql, types)
        result = raw.wait(results_of(raw.pgconn))[-1]
        if result.status != ExecStatus.COMMAND_OK:
            raise errors.error_from_result(result, encoding=raw.info.encoding)
        known._names[sql, types] = name
    return name


@lru_cache(maxsize=500)
def _marked(sql: str, mark: str) -> bytes:
    """The statement as the server takes it, with a text that is not the other's."""
    return f"{numbered(sql)} /* {mark} */".encode()
