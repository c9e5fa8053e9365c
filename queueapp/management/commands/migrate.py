"""``manage.py migrate``, safe when several processes run it at once.

A deploy starts ten containers, each migrates first. Django's command reads what is applied, then applies the rest: two
of them collide half-way ("relation already exists"). Here the second waits for the first and then finds nothing to do.
"""

from __future__ import annotations

from typing import Any

from django.core.management.commands.migrate import Command as MigrateCommand
from django.db import connections

from ...errors import UnsupportedServer
from ...operating import inspection
from ...sql import backend_of


class Command(MigrateCommand):
    """Django's migrate, one at a time per database."""

    def check(self, *args: Any, **options: Any) -> None:
        with inspection.about_to_migrate():
            super().check(*args, **options)

    def handle(self, *args: Any, **options: Any) -> Any:
        # A connection of its own: the lock lives as long as its session, and migrations close and roll back as they like.
        lock = connections[options["database"]].copy()
        try:
            backend = backend_of(lock)
        except UnsupportedServer:
            # Our tables are not made there (``required_db_features``), and those of others are none of our business.
            return super().handle(*args, **options)  # not one of ours: a second database of some other vendor
        try:
            backend.lock_migrations(lock)
            return super().handle(*args, **options)
        finally:
            lock.close()
