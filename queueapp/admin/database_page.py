"""The health of each database with queues: what makes all of its queues slow, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext, suppress
from datetime import timedelta
from typing import Any

from django.core.exceptions import PermissionDenied
from django.db import Error, connections, router, transaction
from django.http import HttpRequest, HttpResponse

from .. import registry
from ..errors import UnsupportedServer
from ..models import DelayedMessage, PoisonMessage
from ..operations.safe_reads import Reader
from ..sql import backend_of
from ..sql.database_health import SnapshotHolder, TableHealth
from .formatting import display, untrusted
from .operations import render_page

#: Holders and tables that are shown.
HOLDERS, TABLES = 10, 50
#: A transaction that is older holds back the removal of dead rows, and with it every claim.
LONG = timedelta(minutes=10)
#: Dead rows that matter, at least, and in relation to the live ones.
DEAD_ROWS, DEAD_SHARE = 100_000, 2.0


def health_view(page: Any, request: HttpRequest) -> HttpResponse:
    """The page."""
    if request.method not in ("GET", "HEAD") or not page.has_view_permission(request):
        raise PermissionDenied
    tables: dict[str, list[str]] = {}
    for model in (*registry.queues, DelayedMessage, PoisonMessage):
        tables.setdefault(router.db_for_read(model) or "default", []).append(model._meta.db_table)
    databases = [_health_of(alias, names) for alias, names in sorted(tables.items())]
    return render_page(page, request, "admin/queueapp/databases.html", "Databases", {"databases": databases})


def long_transactions(aliases: Iterable[str]) -> list[str]:
    """A line for each database with a transaction that is open for longer than ``LONG``, for the overview; one
    statement each. What cannot be read is left out: the page of the databases says why."""
    found = []
    for alias in aliases:
        connection = connections[alias]
        with suppress(Error, UnsupportedServer):
            with transaction.atomic(using=alias) if connection.in_atomic_block else nullcontext():
                holders = backend_of(connection).health.snapshot_holders(connection, 1)
            found += [
                f"Database {alias}: the {holder.kind} {untrusted.visible(holder.name)[:60]} "
                f"({untrusted.visible(holder.details)[:120]}) has been open for {display.of_seconds(holder.seconds)}."
                for holder in holders
                if _is_long(holder)
            ]
    return found


def _health_of(alias: str, tables: list[str]) -> dict[str, Any]:
    reader, connection = Reader(alias), connections[alias]
    errors = []

    def read(what: str, function: Any) -> Any:
        found, cause = reader.read(function)
        if found is None:
            errors.append(f"{what}: {untrusted.visible(cause)[:300]}")
        return found or []

    # Reader.read asks for the backend of the connection, which an unsupported server does not have.
    facts = read("settings", lambda: backend_of(connection).health.facts(connection))
    holders = read("sessions", lambda: backend_of(connection).health.snapshot_holders(connection, HOLDERS))
    found = read("tables", lambda: backend_of(connection).health.tables(connection, tables))
    return {
        "alias": alias,
        "facts": facts,
        "holders": [_holder(holder) for holder in holders],
        "tables": [_table(table) for table in found[:TABLES]],
        "errors": errors,
        "quiet": f"Nothing to do: no transaction has been open for {display.duration(LONG)}, and no table has more "
        f"than {DEAD_ROWS:,} dead rows and twice as many as live ones.",
        "advice": [
            *(_advice_on_holder(holder, connection) for holder in holders if _is_long(holder)),
            *filter(None, map(advice_on_table, found)),
        ],
    }


def _holder(holder: SnapshotHolder) -> dict[str, Any]:
    return {
        "kind": holder.kind,
        "name": untrusted.inline(holder.name, 60),
        "details": untrusted.inline(holder.details, 120),
        "age": display.of_seconds(holder.seconds),
        "is_long": _is_long(holder),
    }


def _is_long(holder: SnapshotHolder) -> bool:
    return holder.seconds is not None and holder.seconds > LONG.total_seconds()


def _table(table: TableHealth) -> dict[str, Any]:
    return {
        "table": table.table,
        "rows": "\u2013" if table.rows is None else f"{table.rows:,}",
        "dead": "\u2013" if table.dead_rows is None else f"{table.dead_rows:,}",
        "size": display.size(table.table_bytes),
        "indexes": display.size(table.index_bytes),
        "vacuumed": display.moment(table.vacuumed_at),
        "is_bloated": _is_bloated(table),
    }


def _is_bloated(table: TableHealth) -> bool:
    dead = table.dead_rows or 0
    return dead > DEAD_ROWS and dead > DEAD_SHARE * (table.rows or 0)


def _advice_on_holder(holder: SnapshotHolder, connection: Any) -> str:
    name, age = untrusted.visible(holder.name)[:60], display.of_seconds(holder.seconds)
    end = untrusted.visible(backend_of(connection).health.ending_of(holder))
    return (
        f"The {holder.kind} {name} has been open for {age}. Until it ends, the database removes no row that was "
        f"deleted after its begin, and each claim has to read past them: all queues become slower. Find out what it "
        f"does, then {end}."
    )


def advice_on_table(table: TableHealth) -> str:
    """What to do about a bloated table; '' where there is nothing to do."""
    if not _is_bloated(table):
        return ""
    return (
        f"The table {table.table} has {table.dead_rows:,} dead rows. If no old transaction is above, run VACUUM on it, "
        "and see whether autovacuum keeps up: docs/performance.md."
    )
