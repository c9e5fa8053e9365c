"""What everything is compared with: plain psycopg loops over the queues' own statements.

One connection (or one per thread), prepared and binary, durable commits, no framework, nothing decoded but the keys.
The claims start at a floor as the engine's do, and have their limit as a parameter. Two loops are by hand with Django
instead (``delete_and_call`` and the same in fewer trips).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Any

import psycopg
from django.db import connection, transaction

from queueapp.sql.claims import SeqRange
from queueapp.sql.postgresql.raw.pipelined_claims import OpeningClaim
from tests.benchmarks.rig.database import raw_connection

_FREE = (
    "(lease_expires IS NULL OR lease_expires < clock_timestamp()) AND (expires IS NULL OR expires > clock_timestamp())"
)
_LOWEST = (
    "seq = ANY(ARRAY(SELECT seq FROM {table} WHERE seq >= %s AND seq <= 9223372036854775807 AND " + _FREE + " "
    "ORDER BY seq LIMIT %s FOR UPDATE SKIP LOCKED)) RETURNING seq, id, headers, body, deliveries"
)
LEASE = (
    "UPDATE {table} SET lease_token = %s, lease_owner = %s, lease_expires = clock_timestamp() + %s * interval '1 ms', "
    "deliveries = deliveries + 1 WHERE " + _LOWEST
)
DELETE = "DELETE FROM {table} WHERE " + _LOWEST
ACK = "DELETE FROM {table} WHERE lease_token = %s AND seq = ANY(%s)"
INSERT_ENTRY = "INSERT INTO benchmarks_entry (number, text) VALUES (%s, %s) RETURNING id"

_TOKEN = "01890a5d-ac96-774b-bcce-b302099a8057"
_TEXT = "x" * 175


def seqs_of(cursor: psycopg.Cursor[Any]) -> list[int]:
    """The first column of the result in flight; the others stay undecoded."""
    result = cursor.pgresult
    assert result is not None
    value, convert = result.get_value, int.from_bytes
    return [convert(value(row, 0) or b"", "big") for row in range(result.ntuples)]


def copy(raw: psycopg.Connection[Any], table: str, rows: Sequence[Sequence[Any]]) -> None:
    """Put rows (id, headers, body) into a table: a binary COPY."""
    with raw.cursor() as cursor, cursor.copy(f"COPY {table} (id, headers, body) FROM STDIN (FORMAT BINARY)") as copying:
        copying.set_types(["uuid", "text", "bytea"])
        for row in rows:
            copying.write_row(row)


def lease_and_ack(table: str, batch: int = 100) -> float:
    """Lease a batch, ack it, until the table is empty; returns the seconds."""
    lease, ack = LEASE.format(table=table), ACK.format(table=table)
    with raw_connection() as raw, raw.cursor(binary=True) as cursor:
        floor = 0
        started = monotonic()
        while True:
            cursor.execute(lease, (_TOKEN, _TOKEN, 30_000, floor, batch), prepare=True)
            seqs = seqs_of(cursor)
            if not seqs:
                return monotonic() - started
            floor = max(seqs) + 1
            cursor.execute(ack, (_TOKEN, seqs), prepare=True)


def lease_and_ack_under_lock(table: str) -> float:
    """Under the lock of the table, as claims that count what is in flight: lease one message. Then ack it, until the
    table is empty; returns the seconds."""
    lease, ack = LEASE.format(table=table), ACK.format(table=table)
    with raw_connection() as raw, raw.cursor(binary=True) as cursor:
        floor = 0
        started = monotonic()
        while True:
            with raw.transaction():
                cursor.execute("SELECT pg_advisory_xact_lock(4711)", prepare=True)
                cursor.execute(lease, (_TOKEN, _TOKEN, 30_000, floor, 1), prepare=True)
                seqs = seqs_of(cursor)
            if not seqs:
                return monotonic() - started
            floor = max(seqs) + 1
            cursor.execute(ack, (_TOKEN, seqs), prepare=True)


def delete(table: str, batch: int = 100) -> float:
    """Delete a batch, commit, until the table is empty; returns the seconds."""
    statement = DELETE.format(table=table)
    with raw_connection() as raw, raw.cursor(binary=True) as cursor:
        floor = 0
        started = monotonic()
        while True:
            cursor.execute(statement, (floor, batch), prepare=True)
            seqs = seqs_of(cursor)
            if not seqs:
                return monotonic() - started
            floor = max(seqs) + 1


def delete_and_insert(table: str, threads: int) -> float:
    """Per transaction: delete one message, insert one row. In so many threads, until the table is empty; seconds."""
    statement = DELETE.format(table=table)
    floor = [0]

    def work(raw: psycopg.Connection[Any]) -> None:
        with raw.cursor(binary=True) as cursor:
            while True:
                cursor.execute("BEGIN")
                cursor.execute(statement, (floor[0], 1), prepare=True)
                seqs = seqs_of(cursor)
                if not seqs:
                    cursor.execute("COMMIT")
                    return
                floor[0] = max(floor[0], seqs[0] + 1)
                cursor.execute(INSERT_ENTRY, (seqs[0], _TEXT), prepare=True)
                cursor.fetchall()
                cursor.execute("COMMIT")

    connections = [raw_connection() for _ in range(threads)]
    try:
        return in_threads([lambda raw=raw: work(raw) for raw in connections])  # type: ignore[misc]
    finally:
        for raw in connections:
            raw.close()


def delete_and_call(table: str, threads: int, handler: Callable[[Any], None], read: Callable[[bytes], Any]) -> float:
    """As ``delete_and_insert`` with a handler that uses the ORM: what one writes by hand with Django. Per transaction,
    which is an ``atomic()``: delete one message by psycopg, read its body, call the handler."""
    statement = DELETE.format(table=table)
    floor = [0]

    def work() -> None:
        with _connected(), connection.connection.cursor(binary=True) as cursor:
            while _receive_single(cursor):
                pass

    def _receive_single(cursor: psycopg.Cursor[Any]) -> bool:
        with transaction.atomic():
            cursor.execute(statement, (floor[0], 1), prepare=True)
            row = cursor.fetchone()
            if row is None:
                return False
            floor[0] = max(floor[0], row[0] + 1)
            handler(read(row[3]))
        return True

    return in_threads([work] * threads)


def delete_and_call_in_fewer_trips(
    table: str, threads: int, handler: Callable[[Any], None], read: Callable[[bytes], Any]
) -> float:
    """As ``delete_and_call`` with the trips of a worker and nothing else of it, which is what a worker could reach at
    best: the commit of a message takes the next DELETE along, by the same packed statement, and to Django all of it is
    one ``atomic()``."""
    claim = OpeningClaim(DELETE.format(table=table).replace("LIMIT %s", "LIMIT 1"))
    floor = [0]

    def work() -> None:
        with _connected(), transaction.atomic():
            result = claim.query.fetch(connection, claim.values(SeqRange(floor[0]), 1))
            while result is not None and result.ntuples:
                floor[0] = max(floor[0], int.from_bytes(result.get_value(0, 0) or b"", "big") + 1)
                handler(read(result.get_value(0, 3) or b""))
                result = claim.query.follow(connection, claim.values(SeqRange(floor[0]), 1))

    return in_threads([work] * threads)


@contextmanager
def _connected() -> Iterator[None]:
    """The thread has a connection of Django's, as a worker's threads have it: what handlers repeat is prepared."""
    try:
        connection.ensure_connection()
        connection.connection.prepare_threshold = 5
        yield
    finally:
        connection.close()


def in_threads(bodies: Sequence[Callable[[], None]]) -> float:
    """Run the bodies at once, one thread each: the seconds until all have ended. Raises what one of them raised."""
    failures: list[BaseException] = []

    def guarded(body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=guarded, args=(body,), daemon=True) for body in bodies]
    started = monotonic()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if failures:
        raise failures[0]
    return monotonic() - started
