"""Child processes use the databases of their parent, whatever the settings that they import say.

A test run renames its databases after the settings were read; a child process reads the settings anew and would open
the real ones. So the names are part of the child's options and are set before it connects.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from django.conf import settings as django_settings
from django.core.management.base import CommandError
from django.db import connections


def database_names() -> dict[str, str]:
    """The present name of each database of this process, by alias."""
    current = {connection.alias: connection.settings_dict for connection in connections.all(initialized_only=True)}
    names = {alias: current.get(alias, entry).get("NAME") for alias, entry in connections.settings.items()}
    return {alias: name for alias, name in names.items() if isinstance(name, str)}


def use_databases(names: Mapping[str, str]) -> None:
    """Let connections that are opened from now on, on any thread, go to the databases of these names."""
    for alias, name in names.items():
        if alias in connections.settings:
            connections.settings[alias]["NAME"] = name


def require_shareable_databases() -> None:
    """Raise CommandError where child processes could not use what this process uses: in a transaction, which they do
    not see, or with settings that are in no module."""
    if not os.environ.get("DJANGO_SETTINGS_MODULE") and not getattr(django_settings, "SETTINGS_MODULE", None):
        raise CommandError(
            "The settings were made by settings.configure(), so worker processes cannot import them: put them into a "
            "module and name it in DJANGO_SETTINGS_MODULE."
        )
    for connection in connections.all(initialized_only=True):
        if connection.in_atomic_block:
            raise CommandError(
                f"There is an open transaction on {connection.alias!r}, and worker processes would not see what is "
                "done in it. In tests use TransactionTestCase, or @pytest.mark.django_db(transaction=True)."
            )
