"""Runs each test of the journal on every database that there is; what is journaled is set for it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from queueapp.models.delivery import Delivery
from queueapp.topics import publisher
from tests.databases import DATABASES, marks_of
from tests.queueapp.sql.server import Server

RETENTION = timedelta(hours=1)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One case per database for each test that asks for ``server``."""
    if "server" in metafunc.fixturenames:
        cases = [pytest.param(alias, id=name, marks=marks_of(alias)) for name, alias in DATABASES.items()]
        metafunc.parametrize("server", cases, indirect=True)


@pytest.fixture
def server(request: pytest.FixtureRequest, settings: Any) -> Iterator[Server]:
    """One database with an empty journal for what begins with "journaled", and as many connections as the test
    wants."""
    settings.QUEUEAPP = {"JOURNAL": {"journaled.for ever": None, "^journaled": RETENTION}, "PEEK_DELAY": 0.1}
    server = Server(request.param)
    yield server
    server.close()


@pytest.fixture
def delivery(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Change the options of a queue for one test."""

    def change(queue: Any, **options: Any) -> None:
        monkeypatch.setattr(queue, "delivery", Delivery(queue.delivery.given | options, "a test's "))
        publisher.forget()

    yield change
    monkeypatch.undo()
    publisher.forget()
