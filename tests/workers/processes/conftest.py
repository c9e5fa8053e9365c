"""What the tests of the watchdog share."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def soon_stuck(settings: Any) -> None:
    """What does not end is given up after a fifth of a second."""
    settings.QUEUEAPP = {"PEEK_DELAY": 0.1, "RETRY_DELAY": 0, "STUCK_HANDLER_AFTER": 0.2}


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """Lets code go that ignores everything else."""
    event = threading.Event()
    yield event
    event.set()
