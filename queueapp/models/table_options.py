"""Storage options of a queue's table and an index for NServiceBus, as constraints that constrain nothing.

Django has no place for ``fillfactor``, per-table autovacuum, a computed ``RowVersion`` or a generated body column. A
constraint is part of the model's state, so it becomes part of the migration, is shown by ``sqlmigrate``, is reversible,
and a changed option is an ordinary migration. Nothing here runs outside migrations.
"""

from __future__ import annotations

from typing import Any

from django.db import models
from django.db.models import F, Q
from django.db.models.constraints import BaseConstraint

from ..sql import backend_of
from ..sql.claims import MAX_PRIORITY

#: ``Meta.required_db_features`` of all our tables. PostgreSQL and SQL Server have it, SQLite has not, so that `migrate`
#: skips them there (a project whose queues are in another database can migrate its SQLite database).
ROWS_CAN_BE_SKIPPED = ["has_select_for_update_skip_locked"]


class _TableFeature(BaseConstraint):
    """A property of a table that no row can violate."""

    def options(self) -> dict[str, Any]:
        return {}

    def validate(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to validate."""

    def check(self, *args: Any, **kwargs: Any) -> list[Any]:
        return []

    def _check(self, *args: Any, **kwargs: Any) -> list[Any]:
        return []

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, type(self)):
            return NotImplemented
        return (self.name, self.options()) == (other.name, other.options())

    __hash__ = BaseConstraint.__hash__

    def deconstruct(self) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
        return f"queueapp.models.{type(self).__name__}", (), {"name": self.name, **self.options()}


class TableOptions(_TableFeature):
    """Storage options of one queue table: fillfactor and autovacuum on PostgreSQL, RowVersion and index options on SQL
    Server."""

    def __init__(self, *, name: str, fillfactor: int = 70, autovacuum_threshold: int = 1000, body_string: bool = False):
        super().__init__(name=name)
        self.fillfactor = fillfactor
        self.autovacuum_threshold = autovacuum_threshold
        self.body_string = body_string

    def options(self) -> dict[str, Any]:
        return {
            "fillfactor": self.fillfactor,
            "autovacuum_threshold": self.autovacuum_threshold,
            "body_string": self.body_string,
        }

    def constraint_sql(self, model: Any, schema_editor: Any) -> Any:
        """What goes into CREATE TABLE. The rest follows the table, deferred."""
        backend, columns = backend_of(schema_editor.connection), self.columns(model)
        after = backend.schema.options_after_create(schema_editor, model._meta.db_table, *columns, self.options())
        schema_editor.deferred_sql.append(after)
        return backend.schema.inline_columns(schema_editor, *columns, self.options())

    def create_sql(self, model: Any, schema_editor: Any) -> str:
        # Never None on PostgreSQL: with parametrised defaults Django defers constraints and executes what it got.
        return backend_of(schema_editor.connection).schema.set_options(
            schema_editor, model._meta.db_table, *self.columns(model), self.options()
        )

    def remove_sql(self, model: Any, schema_editor: Any) -> str:
        return backend_of(schema_editor.connection).schema.reset_options(
            schema_editor, model._meta.db_table, *self.columns(model), self.options()
        )

    def columns(self, model: Any) -> tuple[str, str]:
        """The columns of the order and of the body."""
        column: dict[str, str] = {field.name: field.column for field in model._meta.local_fields}
        return column.get("seq", "seq"), column.get("body", "body")


class RowVersionIndex(_TableFeature):
    """``Index_RowVersion`` on SQL Server; nothing on PostgreSQL.

    NServiceBus' SQL Server transport looks for a nonclustered index that begins with ``RowVersion`` when an endpoint
    starts. On our tables that column is a computed alias of the clustered key, which its statements use anyway: the
    index only satisfies that inspection, and each message pays for it. So only a queue with ``wire_format =
    "nservicebus"`` has it.
    """

    def constraint_sql(self, model: Any, schema_editor: Any) -> Any:
        # Not inline: its column is made with the table.
        schema_editor.deferred_sql.append(self.create_sql(model, schema_editor))
        return None

    def create_sql(self, model: Any, schema_editor: Any) -> str:
        return backend_of(schema_editor.connection).schema.create_row_version_index(schema_editor, model._meta.db_table)

    def remove_sql(self, model: Any, schema_editor: Any) -> str:
        return backend_of(schema_editor.connection).schema.drop_row_version_index(schema_editor, model._meta.db_table)


# -- the index of 64-bit priorities ------------------------------------------------------------------------------------
# The claim index of a queue with a 64-bit ``priority``: highest priority first, then oldest first.
#
# A scan in that order must be able to begin anywhere. PostgreSQL begins by a row comparison, for which both columns
# have to ascend, so the index is on ``~priority``, which unlike ``-priority`` has no number that overflows. SQL Server
# has no row comparison: its index descends.
#
# On PostgreSQL the index has a condition that every row fulfils and that only claims and peeks name, so that no other
# statement uses it: an ack, or the outer half of a claim, finds its rows by ``seq``. For a planner that believes the
# table empty (see ``sql/postgresql/raw/plan_guard.py``) one pass through this index costs less than ten descents
# through the primary key; of a backlog of 300,000 each claim then read all rows (100 ms).


class Priority64Index(models.Index):
    """``(priority DESC, seq)``, in the form in which the database can begin a scan in its middle."""

    def create_sql(self, model: Any, schema_editor: Any, using: str = "", **kwargs: Any) -> Any:
        if schema_editor.connection.vendor != "postgresql":
            return super().create_sql(model, schema_editor, using=using, **kwargs)
        ascending = models.Index(
            F("priority").bitxor(-1), F("seq"), name=self.name, condition=Q(priority__lte=MAX_PRIORITY)
        )
        return ascending.create_sql(model, schema_editor, using=using, **kwargs)

    def deconstruct(self) -> Any:
        _, arguments, options = super().deconstruct()
        return "queueapp.models.Priority64Index", arguments, options
