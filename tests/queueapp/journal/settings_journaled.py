"""The settings of the tests for a child process, which polls often."""

from tests.settings import *  # noqa: F403
from tests.settings import QUEUEAPP as GIVEN

QUEUEAPP = GIVEN | {"PEEK_DELAY": 0.1}
