"""The settings of the tests, with nothing said of logging: some of Celery's tests read what it logs."""

from tests.settings import *  # noqa: F403

LOGGING_CONFIG = None
