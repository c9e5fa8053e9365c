"""The benchmarks' own database: made afresh for a run, dropped after it; filled and looked at beneath the queues."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic, sleep
from typing import Any

import psycopg
from django.core.management import call_command
from django.db import connection, connections, transaction

from queueapp import messages
from queueapp.notifier import CHANNEL
from queueapp.sql import queue_sql
from queueapp.sql.message_columns import Outgoing
from tests.benchmarks.messages import BODY_BYTES, make

#: How often the end of a drain is looked for; a look costs the server 50 µs.
LOOK_EVERY = 0.005
#: No drain of any figure takes nearly as long.
PATIENCE = 600.0
#: So long after its last message a worker looks again by itself, and would begin before the clock.
REST = 0.5


class Stalled(Exception):
    """Messages were not handled in time."""


@contextmanager
def fresh_database() -> Iterator[None]:
    """Create the database that the settings name, with all tables, and drop it in the end."""
    if connection.vendor != "postgresql":
        raise SystemExit("The benchmarks compare with raw SQL of PostgreSQL; DATABASE_URL names another database.")
    _drop()
    with connection._nodb_cursor() as cursor:
        cursor.execute(f"CREATE DATABASE {_name()}")
    try:
        call_command("migrate", run_syncdb=True, verbosity=0)
        yield
    finally:
        connections.close_all()
        _drop()


def _name() -> str:
    return connection.ops.quote_name(connection.settings_dict["NAME"])  # type: ignore[no-any-return]


def _drop() -> None:
    with connection._nodb_cursor() as cursor:
        cursor.execute(f"DROP DATABASE IF EXISTS {_name()} WITH (FORCE)")


def connection_parameters() -> dict[str, Any]:
    """How libpq reaches the database, without anything of Django's."""
    parameters = connection.get_connection_params()
    wanted = ("host", "port", "user", "password", "dbname", "sslmode")
    return {name: parameters[name] for name in wanted if parameters.get(name)}


def raw_connection(*, autocommit: bool = True) -> psycopg.Connection[Any]:
    """One plain psycopg connection."""
    return psycopg.Connection.connect(**connection_parameters(), autocommit=autocommit)


# -- filling ------------------------------------------------------------------------------------------------------


def fill(queue: Any, cls: type, count: int, *, head: str = "", recipient: str = "") -> None:
    """Let the queue hold exactly ``count`` messages of a type, after what the SQL text ``head`` puts before them.

    No worker is woken. The table is as a vacuum leaves it, and a checkpoint was just made, so that neither happens
    halfway through one measurement and not through the other.
    """
    table = connection.ops.quote_name(queue._meta.db_table)
    sleep(REST)
    with connection.cursor() as cursor:
        cursor.execute(f"TRUNCATE {table}")
        if head:
            cursor.execute(f"INSERT INTO {table} {head}")
            cursor.execute(f"VACUUM {table}")
        cursor.execute("CHECKPOINT")
    append(queue, cls, count, recipient=recipient)
    with connection.cursor() as cursor:
        cursor.execute(f"VACUUM (ANALYZE) {table}")


def checkpoint() -> None:
    """Let no checkpoint come by in the next seconds: one is made now."""
    with connection.cursor() as cursor:
        cursor.execute("CHECKPOINT")


def append(queue: Any, cls: type, count: int, *, recipient: str = "") -> None:
    """Put ``count`` messages of a type into a queue; no worker is woken."""
    with transaction.atomic():
        queue_sql(queue, connection).inserts.insert_many(connection, outgoing(cls, count, recipient))


def flood(queue: Any, cls: type, count: int) -> None:
    """As ``append``, made by the server: a million in seconds."""
    with connection.cursor() as cursor:
        cursor.execute(f"INSERT INTO {connection.ops.quote_name(queue._meta.db_table)} {rows_of(cls, count)}")


def rows_of(cls: type, count: int) -> str:
    """The SQL text that makes so many messages of a type, numbered from 0: what follows ``INSERT INTO table``."""
    headers, body = messages.encode(make(cls, 0))  # type: ignore[type-var]
    before, after = body.decode().split("0", 1)
    # Numbers of six digits give bodies of the size of the rule.
    after = after[: BODY_BYTES - len(before) - 8] + '"}'
    return (
        f"(id, headers, body) SELECT gen_random_uuid(), '{headers}', convert_to('{before}' || n || '{after}', 'UTF8') "
        f"FROM generate_series(0, {count - 1}) n"
    )


def outgoing(cls: type, count: int, recipient: str = "") -> Iterator[Outgoing]:
    """Messages of a type as they are stored, numbered from 0."""
    for number in range(count):
        headers, body = messages.encode(make(cls, number))  # type: ignore[type-var]
        yield Outgoing(messages.new_id(), headers, body, recipient=recipient)


# -- draining -----------------------------------------------------------------------------------------------------


def wake(queue: Any) -> None:
    """Wake the workers of a queue."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_notify(%s, %s)", (CHANNEL, queue._meta.label))


def drain(queue: Any, *, above: int = 0) -> float:
    """Wake the queue's workers; returns the seconds until every message above a seq is gone. Raises Stalled."""
    # Backwards from the end of the index: a look finds a message at once as long as there are many.
    table = connection.ops.quote_name(queue._meta.db_table)
    query = f"SELECT seq FROM {table} WHERE seq > {above} ORDER BY seq DESC LIMIT 1"
    with raw_connection() as raw, raw.cursor() as cursor:
        # And by nothing else. A vacuum beside an old snapshot finds no rows; a look then read all of the dead ones, for
        # a second and on the other processor: half of what a worker handled meanwhile.
        cursor.execute("SET enable_sort = off; SET enable_seqscan = off; SET enable_bitmapscan = off")
        started = monotonic()
        wake(queue)
        while True:
            looked = monotonic()
            if cursor.execute(query, prepare=True).fetchone() is None:
                return looked - started
            if looked - started > PATIENCE:
                raise Stalled(f"{queue._meta.label} was not drained in {PATIENCE:.0f} s.")
            # A look costs what a third of a message does, and the raw loops have no process that looks. So it is a
            # two-hundredth late at most.
            sleep(max(LOOK_EVERY, (looked - started) / 200))


def wait_until(condition: Callable[[], bool], what: str, patience: float) -> None:
    """Look until the condition holds. Raises Stalled."""
    deadline = monotonic() + patience
    while not condition():
        if monotonic() > deadline:
            raise Stalled(f"Waited {patience:.0f} s in vain for {what}.")
        sleep(LOOK_EVERY)


def waiting(queue: Any) -> int:
    """How many messages are in the queue."""
    return queue.objects.count()  # type: ignore[no-any-return]


def largest_seq(queue: Any) -> int:
    """The seq of the newest message, 0 when there is none."""
    return queue.objects.order_by("-seq").values_list("seq", flat=True).first() or 0
