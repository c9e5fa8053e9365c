"""A task on a thread of its own, on every database that there is; the others are skipped by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from django.db import connections

from tests.databases import DATABASES, known_as, marks_of
from tests.workers.connections.guarded_thread import GuardedThread, elsewhere


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One case per database for each test that asks for ``guarded``."""
    if "guarded" in metafunc.fixturenames:
        cases = [
            pytest.param(alias, id=name, marks=marks_of(alias, elsewhere(alias))) for name, alias in DATABASES.items()
        ]
        metafunc.parametrize("guarded", cases, indirect=True)


@pytest.fixture(scope="module")
def other_aliases(django_db_setup: None) -> Iterator[None]:
    """Further aliases of the same databases: as far as Django and the servers know, other ones."""
    with ExitStack() as known:
        for alias in set(DATABASES.values()) & set(connections.settings):
            known.enter_context(known_as(elsewhere(alias), of=alias))
        yield


@pytest.fixture
def guarded(other_aliases: None, request: pytest.FixtureRequest) -> Iterator[GuardedThread]:
    """Handlers of the test's own, called as tasks call them."""
    guarded = GuardedThread(request.param)
    yield guarded
    guarded.close()
