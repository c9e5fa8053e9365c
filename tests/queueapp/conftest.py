"""Queues with other options, for one test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from queueapp import sql
from queueapp.models.delivery import Delivery
from queueapp.topics import publisher


@pytest.fixture
def delivery(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Change the options of a queue for one test."""

    def forget() -> None:
        publisher.forget()
        sql.forget()

    def change(queue: Any, **options: Any) -> None:
        monkeypatch.setattr(queue, "delivery", Delivery(queue.delivery.given | options, "a test's "))
        forget()

    yield change
    monkeypatch.undo()
    forget()


@pytest.fixture
def few_receivers(settings: Any) -> None:
    """The tests have more queues than the server has connections for, with the usual number of receivers."""
    settings.QUEUEAPP = {**getattr(settings, "QUEUEAPP", {}), "CONCURRENCY": 1}
