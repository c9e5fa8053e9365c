"""Runs each conformance test for every semantics that it names and every database that there is.

``@modes("NRS")`` on a test says for which of NServiceBus' transaction modes it holds: N (none) is AT_MOST_ONCE, R
(receive only) is AT_LEAST_ONCE, S (sends atomic with receive) is TRANSACTIONAL. T, which it has not, is S with several
messages a transaction; I is S with a consumer of whole sets.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.conformance.endpoint import Endpoint
from tests.databases import DATABASES, marks_of
from tests.in_process_worker import Worker, starting_workers
from tests.testapp.models import AtMostOnce, InSets, Leased, Together, Transactional
from workers.services import lease_renewer

QUEUES = {"N": AtMostOnce, "R": Leased, "S": Transactional, "T": Together, "I": InSets}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One case per database and mode."""
    if "endpoint" not in metafunc.fixturenames:
        return
    marker = metafunc.definition.get_closest_marker("modes")
    letters = marker.args[0] if marker else "NRS"
    cases = []
    for database, alias in DATABASES.items():
        for queue in map(QUEUES.get, letters):
            name = f"{database}-{queue.delivery.semantics.value}{'-together' * (queue is Together)}{'-in-sets' * (queue is InSets)}"  # noqa: E501
            cases.append(pytest.param((queue, alias), id=name, marks=marks_of(alias)))
    metafunc.parametrize("endpoint", cases, indirect=True)


@pytest.fixture
def endpoint(
    request: pytest.FixtureRequest,
    settings: Any,
    no_consumers: None,
    caplog: pytest.LogCaptureFixture,
) -> Iterator[Endpoint]:
    """A queue without messages and without consumers, on one database in one semantics."""
    queue, alias = request.param
    settings.QUEUEAPP = {"PEEK_DELAY": 0.1, "RETRY_DELAY": 0, "DISPATCH_INTERVAL": 0.1}
    endpoint = Endpoint(queue, alias, tag=request.node.name[:100])
    caplog.set_level(logging.INFO)
    yield endpoint
    endpoint.close()
    critical = [record.getMessage() for record in caplog.get_records("call") if record.levelno >= logging.CRITICAL]
    assert critical == [], "nothing critical may be logged"


@pytest.fixture
def nothing_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the machine stands still for a moment, what waits behind a handler is not given to others: that costs it
    its place."""
    monkeypatch.setattr(lease_renewer, "SLOW_HANDLER_AFTER", 3_600.0)


@pytest.fixture
def work() -> Iterator[Callable[..., Worker]]:
    """Starts workers that end with the test."""
    with starting_workers() as start:
        yield start
