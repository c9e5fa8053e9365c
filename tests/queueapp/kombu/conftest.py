"""What the tests of Celery's broker share: a database whose commits are real, and no threads that outlive a test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from queueapp.kombu.member import stop_members
from tests.databases import parametrize_alias
from tests.inprocess import real_commits

#: The apps whose tables a test may write to.
APPS = [*real_commits.kwargs["available_apps"], "queueapp.kombu"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One case per database."""
    parametrize_alias(metafunc, APPS)


@pytest.fixture(autouse=True)
def no_members() -> Iterator[None]:
    yield
    stop_members()
