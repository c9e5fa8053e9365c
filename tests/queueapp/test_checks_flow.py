"""Checks of limits and fairness."""

from __future__ import annotations

from typing import Any

import pytest

from queueapp import FairnessModel, Semantics, checks
from queueapp.models import ClaimRecord
from tests.testapp.models import (
    Capped,
    CappedOnce,
    CappedTransactional,
    ForeignPostgres,
    Grouped,
    InTurnsOnce,
    Ordered,
)


def found_for(queue: Any) -> list[str]:
    return [row.id for row in checks.check_flow() if row.obj is queue]


@pytest.mark.parametrize("model", [FairnessModel.FAST, FairnessModel.PROPORTIONAL])
def test_fairness_model_of_an_at_most_once_queue_is_round_robin(
    monkeypatch: pytest.MonkeyPatch, model: FairnessModel
) -> None:
    assert found_for(CappedOnce) == found_for(InTurnsOnce) == []
    monkeypatch.setattr(InTurnsOnce.delivery, "fairness_model", model)
    assert found_for(InTurnsOnce) == ["queueapp.E040"]


def test_fairness_model_of_a_transactional_queue_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found_for(CappedTransactional) == []
    monkeypatch.setattr(CappedTransactional.delivery, "fairness_model", FairnessModel.PROPORTIONAL)
    assert found_for(CappedTransactional) == ["queueapp.E041"]


def test_max_backlog_without_lease_columns_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ForeignPostgres.delivery, "max_backlog", 5)
    assert found_for(ForeignPostgres) == []
    monkeypatch.setattr(ForeignPostgres.delivery, "semantics", CappedOnce.delivery.semantics)
    assert found_for(ForeignPostgres) == ["queueapp.E042"]


def test_max_per_subscription_backlog_above_max_backlog_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Capped.delivery, "max_per_subscription_backlog", 5)
    assert found_for(Capped) == []
    monkeypatch.setattr(Capped.delivery, "max_per_subscription_backlog", 6)
    assert found_for(Capped) == ["queueapp.E043"]


@pytest.mark.parametrize(
    ("option", "value", "cause"),
    [
        ("semantics", Semantics.AT_MOST_ONCE, "may be lost with its process"),
        ("dedupe_key", lambda body: "", "may be replaced or not stored"),
    ],
)
def test_groups_whose_members_end_unseen_are_an_error(
    monkeypatch: pytest.MonkeyPatch, option: str, value: Any, cause: str
) -> None:
    assert found_for(Grouped) == []
    monkeypatch.setattr(Grouped.delivery, option, value)
    (error,) = [row for row in checks.check_flow() if row.obj is Grouped and row.id == "queueapp.E045"]
    assert cause in error.msg


@pytest.mark.parametrize(
    ("option", "value", "cause"),
    [
        ("semantics", Semantics.AT_MOST_ONCE, "has left the table before it is handled"),
        ("priorities", 3, "have an order of their own"),
        ("max_backlog", 5, "claim in another way"),
        ("transaction_size", 2, "messages of a batch fail together"),
    ],
)
def test_ordering_keys_beside_what_changes_the_order_are_an_error(
    monkeypatch: pytest.MonkeyPatch, option: str, value: Any, cause: str
) -> None:
    assert found_for(Ordered) == []
    monkeypatch.setattr(Ordered.delivery, option, value)
    (error,) = [row for row in checks.check_flow() if row.obj is Ordered and row.id == "queueapp.E046"]
    assert cause in error.msg


def test_more_tasks_than_messages_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Capped.delivery, "concurrency", 4)
    monkeypatch.setattr(Capped.delivery, "max_per_subscription_backlog", 4)
    assert found_for(Capped) == []
    monkeypatch.setattr(Capped.delivery, "max_per_subscription_backlog", 1)
    assert found_for(Capped) == ["queueapp.W040"]
    monkeypatch.setattr(Capped.delivery, "concurrency", 6)
    assert found_for(Capped) == ["queueapp.W040", "queueapp.W041"]


class NoRecords:
    def allow_migrate(self, db: str, app_label: str, model_name: str | None = None, **_: Any) -> bool | None:
        return False if model_name == ClaimRecord._meta.model_name else None


def test_max_backlog_where_no_claim_can_be_recorded_is_an_error(settings: Any) -> None:
    settings.DATABASE_ROUTERS = [NoRecords()]
    assert found_for(Capped) == found_for(CappedOnce) == ["queueapp.E044"]
    assert found_for(CappedTransactional) == found_for(InTurnsOnce) == []
