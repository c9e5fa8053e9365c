"""The index that NServiceBus' SQL Server transport looks for when an endpoint starts, as a constraint that constrains nothing.

It wants a nonclustered index that begins with ``RowVersion``. On our tables that column is a computed alias of the clustered
key, which its statements use anyway: the index serves the inspection, and each message pays for it. So only a queue that
says ``wire_format = "nservicebus"`` has it.
"""

from __future__ import annotations

from typing import Any

from django.db.models.constraints import BaseConstraint

from ..sql import backend_of


class RowVersionIndex(BaseConstraint):
    """``Index_RowVersion`` on SQL Server; nothing on PostgreSQL, where NServiceBus looks for no index."""

    def constraint_sql(self, model: Any, schema_editor: Any) -> Any:
        # Nothing inline: the column it is on is made with the table, so it follows it.
        schema_editor.deferred_sql.append(self.create_sql(model, schema_editor))
        return None

    def create_sql(self, model: Any, schema_editor: Any) -> str:
        return backend_of(schema_editor.connection).schema.create_row_version_index(schema_editor, model._meta.db_table)

    def remove_sql(self, model: Any, schema_editor: Any) -> str:
        return backend_of(schema_editor.connection).schema.drop_row_version_index(schema_editor, model._meta.db_table)

    def validate(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to validate: no row can break an index."""

    def check(self, *args: Any, **kwargs: Any) -> list[Any]:
        return []

    def _check(self, *args: Any, **kwargs: Any) -> list[Any]:
        return []

    def __eq__(self, other: object) -> bool:
        return self.name == other.name if isinstance(other, RowVersionIndex) else NotImplemented

    __hash__ = BaseConstraint.__hash__

    def deconstruct(self) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
        return "queueapp.models.RowVersionIndex", (), {"name": self.name}
