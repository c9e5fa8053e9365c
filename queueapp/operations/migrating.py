"""Makes ``migrate`` safe when several processes run it at once.

A deploy starts ten containers, and each migrates first. Django reads what is applied, makes a plan and applies it: two
processes collide half-way ("relation already exists"). So the second one waits for a lock of the database before Django
makes the plan. The first thing that ``migrate`` does is to run the checks of its database: one of them takes the lock.
``post_migrate`` of the last app releases it; after a failure the database frees it with the session, when the process
ends.

``call_command("migrate")`` skips the checks. It takes the lock at ``pre_migrate``, after the plan was made, and is
refused if another process has carried out a part of the plan meanwhile.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

from django.apps import apps
from django.core.management.base import CommandError
from django.core.management.commands.migrate import Command as MigrateCommand
from django.db import Error, connections
from django.db.migrations.recorder import MigrationRecorder
from django.db.models.signals import post_migrate, pre_migrate

from ..errors import UnsupportedServer
from ..models import Subscription
from ..sql import backend_of
from . import subscriptions

#: Django's plan: migrations, each with whether it is unapplied.
Plan = list[tuple[Any, bool]]


#: By alias, a connection of its own with the lock: migrations close and roll back theirs.
_locks: dict[str, Any] = {}


def connect(app_config: Any) -> None:
    """Connect the receivers, for ``AppConfig.ready``."""
    pre_migrate.connect(before_migrate, dispatch_uid="queueapp.migrating")
    post_migrate.connect(_register_consumers, sender=app_config, dispatch_uid="queueapp.migrating.consumers")


def migrate_options() -> dict[str, Any] | None:
    """The options of the ``migrate`` command that runs the caller, a check; None: none does. It passes nothing that
    says so, so this searches the call stack."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if isinstance(frame.f_locals.get("self"), MigrateCommand) and "options" in frame.f_locals:
            return dict(frame.f_locals["options"])
        frame = frame.f_back
    return None


def lock(alias: str) -> None:
    """Wait for the lock of a database, unless this process has it. Raises what reaching the database raises."""
    held = _locks.get(alias)
    if held is not None and held.is_usable():
        return  # from the check that was run before, or from a run that failed
    connection = connections[alias].copy()
    try:
        backend = backend_of(connection)
    except UnsupportedServer:
        return  # a database of another vendor has none of our tables
    try:
        backend.schema.lock_migrations(connection)
    except BaseException:
        connection.close()
        raise
    _locks[alias] = connection
    # Connected now, it is the last receiver: those of other apps, which create permissions for one, run under the lock.
    post_migrate.connect(unlock, dispatch_uid="queueapp.migrating.unlock")


def before_migrate(*, using: str, plan: Plan | None = None, **_: Any) -> None:
    """Each app sends this signal, so all but the first find the lock taken."""
    if plan is None or using in _locks:
        return
    lock(using)
    applied = MigrationRecorder(connections[using]).applied_migrations() if plan and using in _locks else {}
    if any(((migration.app_label, migration.name) in applied) is not backwards for migration, backwards in plan):
        # Django has read the state before, so it can neither go on from there nor end as if it had done it.
        raise CommandError(f"Another process migrated the database {using!r} meanwhile. Run migrate again.")


def last_app() -> Any:
    """The app of which ``post_migrate`` is sent last."""
    return [config for config in apps.get_app_configs() if config.models_module is not None][-1]


def unlock(*, sender: Any, using: str, plan: Plan | None = None, **_: Any) -> None:
    """Each app sends this signal; the last one frees the lock."""
    if plan is None or sender is not last_app() or (connection := _locks.pop(using, None)) is None:
        return
    with suppress(Error):  # a lost session has lost its lock
        # A pool of connections keeps the session, and with it the lock, after close().
        backend_of(connection).schema.unlock_migrations(connection)
    connection.close()


def _register_consumers(*, using: str, plan: Plan | None = None, **_: Any) -> None:
    """Subscribe the consumers of this code: before the first worker of a deploy starts, while those of the last one
    still run. ``flush`` sends the signal without a plan."""
    # Migrated backwards, the table is not there.
    if plan is not None and Subscription._meta.db_table in connections[using].introspection.table_names():
        subscriptions.register(using)
