"""``manage.py migrate``, safe when several processes run it at once.

A deploy starts ten containers, each migrates first. Django's command reads what is applied, then applies the rest: two
of them collide half-way ("relation already exists"). Here the second waits for the first and then finds nothing to do.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from django.core.management.base import CommandError
from django.core.management.commands.migrate import Command as MigrateCommand
from django.db import Error, connections

from ...errors import UnsupportedServer
from ...models import Subscription
from ...operations import schema_check, subscriptions
from ...operations.error_hints import explain
from ...sql import backend_of


class Command(MigrateCommand):
    """Django's migrate, one at a time per database."""

    def check(self, *args: Any, **options: Any) -> None:
        with schema_check.about_to_migrate():
            super().check(*args, **options)

    def handle(self, *args: Any, **options: Any) -> Any:
        # A connection of its own: the lock is its session's, and migrations close and roll back as they like.
        lock = connections[options["database"]].copy()
        try:
            backend = backend_of(lock)
        except UnsupportedServer:
            # Our tables are not made there (``required_db_features``), and those of others are none of our business.
            return super().handle(*args, **options)  # not one of ours: a second database of some other vendor
        try:
            try:
                backend.schema.lock_migrations(lock)
            except Error as error:
                # The first that asks the database: where it is down, or the password wrong, that is all there is to say.
                if line := explain(error):
                    raise CommandError(line) from error
                raise
            try:
                result = super().handle(*args, **options)
                _register_consumers(options)
                return result
            finally:
                with suppress(Error):  # a session that is lost holds no lock any more
                    backend.schema.unlock_migrations(lock)
        finally:
            lock.close()


def _register_consumers(options: dict[str, Any]) -> None:
    """The consumers of this code get their copies from here on: before the first worker of a deploy starts, and while those of the
    last one still run."""
    alias = options["database"]
    if options.get("plan") or options.get("check_unapplied"):
        return
    if Subscription._meta.db_table in connections[alias].introspection.table_names():  # migrated backwards, it is not
        subscriptions.register(alias)
