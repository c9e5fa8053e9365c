"""Children work on the databases of their parent, whatever the settings that they import say.

A test run gives its databases other names after the settings were read; a child process reads them anew and would open
the real ones. So the names travel with the child's options, and are put in before it connects.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from django.conf import settings as django_settings
from django.core.management.base import CommandError
from django.db import connections


def names_of_databases() -> dict[str, str]:
    """The name by alias that each database of this process has by now."""
    now = {one.alias: one.settings_dict for one in connections.all(initialized_only=True)}
    names = {alias: now.get(alias, entry).get("NAME") for alias, entry in connections.settings.items()}
    return {alias: name for alias, name in names.items() if isinstance(name, str)}


def use_databases(names: Mapping[str, str]) -> None:
    """Let connections that are opened from now on, on whichever thread, go to the databases of these names."""
    for alias, name in names.items():
        if alias in connections.settings:
            connections.settings[alias]["NAME"] = name


def refuse_where_children_would_see_another_database() -> None:
    """Raise CommandError where child processes could not work on what this process sees: in a transaction, of which they
    see nothing, or with settings that are in no module."""
    if not os.environ.get("DJANGO_SETTINGS_MODULE") and not getattr(django_settings, "SETTINGS_MODULE", None):
        raise CommandError(
            "The settings were made by settings.configure(), so the processes of a worker cannot import them: "
            "put them into a module and name it in DJANGO_SETTINGS_MODULE."
        )
    for connection in connections.all(initialized_only=True):
        if connection.in_atomic_block:
            raise CommandError(
                f"There is an open transaction on {connection.alias!r}, and the processes of a worker would see nothing of "
                "what is done in it. In tests use TransactionTestCase, or @pytest.mark.django_db(transaction=True)."
            )
