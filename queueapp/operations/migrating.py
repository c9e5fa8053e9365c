"""Makes ``migrate`` safe when several processes run it at once, by receivers of its signals.

A deploy starts ten containers, and each migrates first. Django reads what is applied, makes a plan and applies it: two
processes collide half-way ("relation already exists"). ``pre_migrate`` is sent between the plan and its first statement:
there the second process waits for a lock of the database, and then drops from its plan what the first one has applied.
``post_migrate`` of the last app releases the lock. After a failed migration the database frees it with the session, when
the process ends.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NamedTuple

from django.apps import apps
from django.core.management.base import CommandError
from django.db import Error, connections
from django.db.migrations.recorder import MigrationRecorder
from django.db.models.signals import post_migrate, pre_migrate

from ..errors import UnsupportedServer
from ..models import Subscription
from ..sql import backend_of
from . import subscriptions

#: Django's plan: migrations, each with whether it is unapplied.
Plan = list[tuple[Any, bool]]


class _Lock(NamedTuple):
    """The lock of one database. ``connection`` is one of its own: migrations close and roll back theirs."""

    connection: Any
    plan: Plan


_locks: dict[str, _Lock] = {}


def connect(app_config: Any) -> None:
    """Connect the receivers, for ``AppConfig.ready``."""
    pre_migrate.connect(_lock, dispatch_uid="queueapp.migrating")
    post_migrate.connect(_register_consumers, sender=app_config, dispatch_uid="queueapp.migrating.consumers")


def _lock(*, using: str, plan: Plan | None = None, **_: Any) -> None:
    """Take the lock at the first of the signals of a run; each app sends one."""
    held = _locks.get(using)
    if plan is None or (held is not None and held.plan is plan):
        return
    connection = connections[using].copy() if held is None else held.connection  # a run before has failed and left it
    try:
        backend = backend_of(connection)
    except UnsupportedServer:
        return  # a database of another vendor has none of our tables
    if held is not None and not connection.is_usable():
        connection.close()
        held = None
    if held is None:
        backend.schema.lock_migrations(connection)
    _locks[using] = _Lock(connection, plan)
    # Connected now, it is the last receiver: those of other apps, which create permissions for one, run under the lock.
    post_migrate.connect(_unlock, dispatch_uid="queueapp.migrating.unlock")
    _drop_applied(using, plan)


def _drop_applied(using: str, plan: Plan) -> None:
    """Another process may have carried out the plan while this one waited: then nothing is left to do."""
    applied = MigrationRecorder(connections[using]).applied_migrations()
    remaining = [step for step in plan if ((step[0].app_label, step[0].name) in applied) is step[1]]
    if remaining and len(remaining) < len(plan):
        # The state that Django has read lacks what was applied, so it cannot go on from there.
        raise CommandError(f"Another process migrated the database {using!r} meanwhile, in part. Run migrate again.")
    plan[:] = remaining


def last_app() -> Any:
    """The app of which ``post_migrate`` is sent last."""
    return [config for config in apps.get_app_configs() if config.models_module is not None][-1]


def _unlock(*, sender: Any, using: str, plan: Plan | None = None, **_: Any) -> None:
    if plan is None or sender is not last_app() or (held := _locks.pop(using, None)) is None:
        return
    with suppress(Error):  # a lost session has lost its lock
        # A pool of connections keeps the session, and with it the lock, after close().
        backend_of(held.connection).schema.unlock_migrations(held.connection)
    held.connection.close()


def _register_consumers(*, using: str, plan: Plan | None = None, **_: Any) -> None:
    """Subscribe the consumers of this code: before the first worker of a deploy starts, while those of the last one still run.
    ``flush`` sends the signal without a plan."""
    # Migrated backwards, the table is not there.
    if plan is not None and Subscription._meta.db_table in connections[using].introspection.table_names():
        subscriptions.register(using)
