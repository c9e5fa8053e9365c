"""What the ORM reads of a table of messages, read as the verbs look: it waits for nobody, and nobody waits for it.

PostgreSQL reads row versions and needs nothing. SQL Server does so where READ_COMMITTED_SNAPSHOT is on; elsewhere a plain
SELECT waits behind each row that an open transaction has, which is each TRANSACTIONAL handler, and can be the victim of a
deadlock with a delete.
"""

from __future__ import annotations

from typing import Any, TypeVar, cast

from django.db.models import Model, QuerySet
from django.db.models.sql.datastructures import BaseTable

from .sqlserver.locking import LOOKING

M = TypeVar("M", bound=Model)


class _LookedAt(BaseTable):
    """The table that a query selects from. An UPDATE or DELETE made of it names the table itself, without the hints."""

    def as_microsoft(self, compiler: Any, connection: Any) -> Any:
        # Index: whatever the query has. Safe: LOOKING.
        sql, params = self.as_sql(compiler, connection)
        # select_for_update has hints of its own, in the same place.
        return (sql if compiler.query.select_for_update else f"{sql} WITH ({LOOKING})"), params


def looking(rows: QuerySet[M]) -> QuerySet[M]:
    """The same rows, read as a look, also after further filters. On SQL Server what another open transaction has changed,
    put in or taken is passed over: a figure or a page may miss it, what decides about a message may not."""
    found = rows.all()
    query = cast("Any", found.query)
    # On the query itself, so that every clone of it has it, of whatever class.
    query.base_table_class = _LookedAt
    query.alias_map = {
        alias: _LookedAt(table.table_name, table.table_alias) if type(table) is BaseTable else table
        for alias, table in query.alias_map.items()
    }
    return found
