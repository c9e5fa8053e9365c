"""The settings of the tests, with traces."""

from tests.settings import *  # noqa: F403

INSTALLED_APPS = [*INSTALLED_APPS, "tests.traced.apps.TracedConfig"]  # noqa: F405
QUEUEAPP = QUEUEAPP | {"OPENTELEMETRY": True, "PEEK_DELAY": 0.1, "RETRY_DELAY": 0}  # noqa: F405
