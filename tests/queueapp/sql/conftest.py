"""Runs each test of the SQL layer on every database that there is; the others are skipped by name."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from django.db import connections

from queueapp.sql.postgresql.raw import raw_statement
from tests.databases import DATABASES, marks_of
from tests.queueapp.sql.server import Server


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One case per database for each test that asks for ``server``."""
    if "server" in metafunc.fixturenames:
        cases = [pytest.param(alias, id=name, marks=marks_of(alias)) for name, alias in DATABASES.items()]
        metafunc.parametrize("server", cases, indirect=True)


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """One database with empty tables, real commits, and as many connections as the test wants."""
    server = Server(request.param)
    yield server
    server.close()


@pytest.fixture
def trusting() -> Iterator[None]:
    """For tests that make a session forget its statements: no detection has run yet, before and after."""
    raw_statement.forget_routes()
    connections["default"].close()
    yield
    raw_statement.forget_routes()
    connections["default"].close()
