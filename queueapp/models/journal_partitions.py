"""The migration operation that makes the journal's table."""

from __future__ import annotations

from typing import Any

from django.db.migrations.operations import CreateModel

from ..sql import backend_of

#: Days for which the migration makes partitions. Who keeps the journal makes those that follow.
_FIRST_DAYS = 4


class CreateJournal(CreateModel):
    """``CreateModel`` of the entries: a table partitioned by time where the database has such. The state is an ordinary one."""

    def database_forwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        model = to_state.apps.get_model(app_label, self.name)
        if self.allow_migrate_model(schema_editor.connection.alias, model):
            journal = backend_of(schema_editor.connection).journal(model._meta.db_table)
            journal.create(schema_editor, model)
            for days in range(_FIRST_DAYS if not schema_editor.collect_sql else 0):
                journal.add_partition(schema_editor.connection, days, 10_000)
