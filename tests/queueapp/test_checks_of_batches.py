"""Checks of what contradicts itself where several messages are handled at once."""

from __future__ import annotations

from typing import Any

import pytest

from queueapp.checks import check_batches
from queueapp.consuming.registry import Registration, registered
from queueapp.models.delivery import FairnessModel
from tests.testapp.models import (
    Addressed,
    AtMostOnce,
    CappedEach,
    CappedTransactional,
    ForeignPostgres,
    Leased,
    Together,
    Transactional,
)


def ids(queue: Any) -> list[str]:
    return [found.id for found in check_batches() if found.obj is queue]


def test_queues_as_they_are_declared_are_all_right() -> None:
    assert check_batches() == []


@pytest.mark.parametrize(
    ("queue", "options", "expected"),
    [
        (Leased, {"transaction_size": 2}, ["queueapp.E090"]),
        (AtMostOnce, {"transaction_size": 50}, ["queueapp.E090"]),
        (Transactional, {"transaction_size": 50}, []),
        (CappedTransactional, {"transaction_size": 1000}, ["queueapp.W090"]),
        (Together, {"max_per_subscription_backlog": 10}, ["queueapp.W090"]),
    ],
)
def test_options_that_contradict_each_other(
    monkeypatch: pytest.MonkeyPatch, queue: Any, options: dict[str, Any], expected: list[str]
) -> None:
    for name, value in options.items():
        monkeypatch.setattr(queue.delivery, name, value)

    assert ids(queue) == expected


@pytest.mark.parametrize(("queue", "expected"), [(ForeignPostgres, "queueapp.E091"), (CappedEach, "queueapp.W091")])
def test_batches_that_a_queue_cannot_give(no_consumers: None, queue: Any, expected: str) -> None:
    registered.add(Registration(queue, "several", dict, lambda messages: None, {"batch": 500}))

    assert ids(queue) == [expected]


def test_a_limit_of_a_consumer_where_messages_are_shared_out(
    monkeypatch: pytest.MonkeyPatch, no_consumers: None
) -> None:
    registered.add(Registration(Addressed, "limited", dict, lambda message: None, {"concurrency": 2}))
    assert ids(Addressed) == []

    monkeypatch.setattr(Addressed.delivery, "fairness_model", FairnessModel.ROUND_ROBIN)

    assert ids(Addressed) == ["queueapp.E092"]
