"""Comparing the tables that are there with the tables that migrations would make: columns, indexes, storage options.

A queue works without its indexes and options, only slowly, and nobody notices before the table is large. So they are
looked at when a worker starts (a warning) and by ``manage.py check --database default``, with the statement that mends
them. NServiceBus' SQL Server transport warns of a missing index at start, too. Without a table or a column a worker ends.
SQL Server is told which index to take, so there a missing or renamed one is no matter of speed: nothing is received.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any, NamedTuple

from django.apps import apps
from django.db import Error, connections, models, router, transaction

from ..errors import NotMigrated
from ..models import DelayedMessage, Priority64Index, RowVersionIndex, TableOptions
from ..sql import ErrorKind, backend_of
from ..sql.schema import IndexInfo, SettingAdvice
from ..sql.tables import QueueTable, StoreTable


class Finding(NamedTuple):
    """Something a table lacks, and what would mend it."""

    model: Any
    problem: str
    remedy: str


def missing(alias: str, queues: Iterable[Any], *, by_router: bool = False) -> list[str]:
    """The tables that these (managed) queues and the app itself need in a database and that are not there, and those that lack a
    column, in words. ``by_router``: only those that `migrate` would make there, for who does not work with the rest. Raises
    UnsupportedServer, and what reaching the database raises."""
    connection = connections[alias]
    backend = backend_of(connection)
    own = [
        model
        for model in apps.get_app_config("queueapp").get_models()
        if not by_router or router.allow_migrate_model(alias, model)
    ]
    with connection.cursor() as cursor:
        there = {one.name.lower() for one in connection.introspection.get_table_list(cursor)}
    found = []
    for model in [*own, *queues]:
        table = model._meta.db_table
        try:
            # All columns of one row that is not there: a seek in the primary key, which finds no lock to wait for.
            with transaction.atomic(using=alias):
                model._base_manager.using(alias).filter(pk=_nowhere(model._meta.pk)).first()
        except Error as error:
            kind = backend.error_kind(error)
            if kind is ErrorKind.DENIED:
                continue  # it is there, and this role has nothing to do with it; SQL Server does not even list it then
            if kind is not ErrorKind.MISSING:
                raise
            is_there = table.lower() in there or '"."' in table
            found.append(f"what {table} has by now ({str(error).strip().splitlines()[0]})" if is_there else table)
    return found


def require_tables(alias: str, queues: Iterable[Any], *, by_router: bool = False) -> None:
    """Raise NotMigrated when ``missing`` finds anything, and UnsupportedServer."""
    if lacking := missing(alias, queues, by_router=by_router):
        raise NotMigrated(alias, lacking)


def _nowhere(key: Any) -> Any:
    """A primary key that no row has."""
    if isinstance(key, models.UUIDField):
        return uuid.UUID(int=0)
    return -1 if isinstance(key, models.IntegerField) else ""


def inspect(model: Any, alias: str) -> list[Finding]:
    """What the table of a queue, or of the delayed messages, lacks in this database; [] for a missing table, or when all is
    well. Of a table that is not ours (unmanaged) only what statements cannot do without."""
    connection = connections[alias]
    backend, table = backend_of(connection), model._meta.db_table
    there = backend.schema.indexes(connection, table)
    if not there:
        return []
    required = _named_index(model) if backend.schema.names_indexes else None
    found: list[Finding] = []
    for index in model._meta.indexes:
        if model._meta.managed or index.name == required:
            found += _about_index(model, index, there, connection, named=index.name == required)
    for constraint in model._meta.constraints if model._meta.managed else ():
        if isinstance(constraint, TableOptions):
            for problem, remedy in backend.schema.drift(
                connection, table, *constraint.columns(model), constraint.options()
            ):
                found.append(Finding(model, f"table {table}: {problem}", remedy))
        elif isinstance(constraint, RowVersionIndex) and not backend.schema.has_row_version_index(connection, table):
            with connection.schema_editor(collect_sql=True, atomic=False) as editor:
                statement = constraint.create_sql(model, editor)
            problem = f"table {table}: the index on RowVersion that NServiceBus looks for is missing"
            found.append(Finding(model, problem, statement))
    return found


def remarks(alias: str) -> list[SettingAdvice]:
    """Settings of a database that its operators should know of."""
    connection = connections[alias]
    return backend_of(connection).schema.remarks(connection)


def _named_index(model: Any) -> str | None:
    """The index that statements name as a hint, where they do that."""
    if model is DelayedMessage:
        return StoreTable.of(model, "due").first_index
    return QueueTable.of(model).claim_index


def _about_index(
    model: Any, index: models.Index, there: dict[str, IndexInfo], connection: Any, *, named: bool
) -> list[Finding]:
    columns = tuple(model._meta.get_field(name).column.lower() for name, _ in index.fields_orders)
    # An index that begins with these columns serves as well. By columns and not by name, unless statements name it.
    of_all = index.condition is None and not isinstance(index, Priority64Index)
    serving = [
        name
        for name, one in there.items()
        if tuple(column.lower() for column in one.columns[: len(columns)]) == columns
        and one.usable
        and not (of_all and one.filtered)
    ]
    if index.name in serving or (serving and not named):
        return []
    what, end = f"index {index.name} on ({', '.join(columns)})", ""
    if named:
        end = ": every statement that names it fails (308, 8622)"
    with connection.schema_editor(collect_sql=True, atomic=False) as editor:
        if index.name in there:
            editor.remove_index(model, index)  # disabled, half made, or of other columns or rows
            editor.add_index(model, index)
            problem = f"{what} is something else or out of use"
        elif serving:
            rename = backend_of(connection).schema.rename_index(
                connection, model._meta.db_table, serving[0], index.name
            )
            return [Finding(model, f"{what} is called {serving[0]}{end}", rename)]
        else:
            editor.add_index(model, index)
            problem = f"{what} is missing"
    return [Finding(model, problem + end, " ".join(editor.collected_sql).rstrip(";"))]
