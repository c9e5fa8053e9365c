"""The same before the connection is used."""

from tests.queueapp.management.settings_on_sqlite import *  # noqa: F403

SILENCED_SYSTEM_CHECKS = []
