"""Schedules of one test: its declarations are forgotten afterwards, and the clock is the test's."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from queueapp.schedules import declarations, stored
from tests.databases import parametrize_alias
from tests.in_process_worker import real_commits


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One case per database."""
    parametrize_alias(metafunc, real_commits.kwargs["available_apps"])


@pytest.fixture(autouse=True)
def declared(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The declarations of the process: none yet."""
    found: dict[str, Any] = {}
    monkeypatch.setattr(declarations, "declared", found)
    return found


class MovedClock:
    """The time of the database as the schedules see it."""

    def __init__(self) -> None:
        self.now = datetime(2026, 1, 1, tzinfo=UTC)

    def __call__(self, connection: Any) -> datetime:
        return self.now

    def move(self, **span: float) -> datetime:
        """Let so much time pass."""
        self.now += timedelta(**span)
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> MovedClock:
    """A clock that the test moves; it begins on 2026-01-01, 00:00 UTC."""
    moved = MovedClock()
    monkeypatch.setattr(stored, "clock", moved)
    return moved


class OneDatabase:
    """A router that puts everything into one database."""

    def __init__(self, alias: str) -> None:
        self.alias = alias

    def db_for_write(self, model: Any, **hints: Any) -> str | None:
        return self.alias if model._meta.app_label in ("testapp", "queueapp") else None

    db_for_read = db_for_write


@pytest.fixture
def placed(alias: str, settings: Any) -> str:
    """The queues and the schedules are in the database of this case."""
    settings.DATABASE_ROUTERS = [OneDatabase(alias)]
    return alias
