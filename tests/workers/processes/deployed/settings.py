"""The settings of the tests with this app, for worker processes."""

from tests.settings import *  # noqa: F403
from tests.settings import INSTALLED_APPS as GIVEN_APPS
from tests.settings import QUEUEAPP as GIVEN

INSTALLED_APPS = [*GIVEN_APPS, "tests.workers.processes.deployed"]
QUEUEAPP = GIVEN | {"PEEK_DELAY": 0.1, "HEARTBEAT_INTERVAL": 0.5, "DEAD_AFTER": 3}
