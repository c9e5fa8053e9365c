"""Checks of what contradicts itself in the order of a queue."""

from __future__ import annotations

from typing import Any

import pytest

from queueapp.checks import check_order
from queueapp.models import BarrierDelivery
from tests.testapp.models import Addressed, ForeignPostgres, Leased, Urgent
from tests.testapp.ordering import Fenced, Ranked


def ids(queue: Any) -> list[str]:
    return [found.id for found in check_order() if found.obj is queue]


def test_queues_as_they_are_declared_are_all_right() -> None:
    assert check_order() == []


@pytest.mark.parametrize(
    ("queue", "options", "expected"),
    [
        (Ranked, {"barriers": True}, ["queueapp.E050"]),
        (Urgent, {"barrier_expression": "/last"}, ["queueapp.E050"]),
        (Ranked, {"priorities": 3}, ["queueapp.E052"]),
        (Ranked, {"recipients": True}, ["queueapp.E053"]),
        (ForeignPostgres, {"priority": "/price"}, ["queueapp.E054"]),
        (ForeignPostgres, {"barriers": True}, ["queueapp.E054"]),
        (Addressed, {"barriers": True}, []),
        (Leased, {"target_queue_depth": 1000}, []),
    ],
)
def test_options_that_exclude_each_other(
    monkeypatch: pytest.MonkeyPatch, queue: Any, options: dict[str, Any], expected: list[str]
) -> None:
    for name, value in options.items():
        monkeypatch.setattr(queue.delivery, name, value, raising=False)

    assert ids(queue) == expected


class NoTables:
    def allow_migrate(self, db: str, app_label: str, model_name: str | None = None, **_: Any) -> bool | None:
        return False if model_name == BarrierDelivery._meta.model_name else None


def test_barriers_where_nothing_keeps_them_are_an_error(settings: Any) -> None:
    settings.DATABASE_ROUTERS = [NoTables()]

    assert ids(Fenced) == ["queueapp.E055"]
