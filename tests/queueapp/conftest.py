"""Queues with other options, for one test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from queueapp import sql
from queueapp.models.delivery import Delivery
from queueapp.topics import routing


@pytest.fixture
def delivery(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Change the options of a queue for one test."""

    def forget() -> None:
        routing.forget()
        sql.forget()

    def change(queue: Any, **options: Any) -> None:
        monkeypatch.setattr(queue, "delivery", Delivery(queue.delivery.given | options, "a test's "))
        forget()

    yield change
    monkeypatch.undo()
    forget()
