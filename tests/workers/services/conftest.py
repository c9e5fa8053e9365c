"""Fixtures of the tests of lease upkeep."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from tests.conformance.gate import Gate
from tests.in_process_worker import DEADLINE, patience
from tests.testapp.models import Leased, Urgent
from tests.workers.services.slow_handler import Slow
from workers.services import lease_renewer


@pytest.fixture
def fast(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases of three seconds, or what those are where others want the same cores: what waits behind a handler that is
    to be slow must not expire before that has begun."""
    settings.QUEUEAPP = {"PEEK_DELAY": 0.1, "RETRY_DELAY": 0}
    for queue in (Leased, Urgent):
        monkeypatch.setattr(queue.delivery, "lease_period", timedelta(seconds=min(patience(3.0), 12.0)))


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.let(100)


@pytest.fixture
def slow(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    """However short its handler has been running, it counts as slow."""
    monkeypatch.setattr(lease_renewer, "SLOW_HANDLER_AFTER", 0.0)
    slow = Slow(gate)
    yield slow
    assert slow.renewals.stop(DEADLINE)


# -- behind a slow handler ---------------------------------------------------------------------------------------------
