"""Checks of limits and fairness."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import connections

from queueapp import FairnessModel, Ordering, Semantics, checks
from queueapp.models import ClaimRecord, KeyTokenBucket
from tests.testapp.models import (
    Capped,
    CappedOnce,
    CappedTransactional,
    Followed,
    ForeignPostgres,
    Grouped,
    InTurnsOnce,
    Ledgered,
    LimitedPerKey,
    LimitedPerKeyTransactional,
    Ordered,
    RatedPerKey,
    Shared,
)
from tests.testapp.ordering import Fenced


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
        ("semantics", Semantics.AT_MOST_ONCE, "comes before its handler"),
        ("barriers", True, "leaves the table before"),
        ("deferred_ack_expiration", timedelta(hours=1), "may come before its message"),
    ],
)
def test_follow_ups_that_would_not_be_sent_are_an_error(
    monkeypatch: pytest.MonkeyPatch, option: str, value: Any, cause: str
) -> None:
    assert found_for(Followed) == []
    monkeypatch.setattr(Followed.delivery, option, value)
    (error,) = [row for row in checks.check_flow() if row.obj is Followed and row.id == "queueapp.E049"]
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


@pytest.mark.parametrize(
    ("option", "value", "cause"),
    [
        ("ordering", Ordering.HOLD, "has keys of its own"),
        ("semantics", Semantics.AT_MOST_ONCE, "has left the table before it is handled"),
        ("max_backlog", 5, "claim in another way"),
    ],
)
def test_turns_of_keys_beside_another_order_are_an_error(
    monkeypatch: pytest.MonkeyPatch, option: str, value: Any, cause: str
) -> None:
    assert found_for(Shared) == []
    monkeypatch.setattr(Shared.delivery, option, value)
    (error,) = [row for row in checks.check_flow() if row.obj is Shared and row.id == "queueapp.E047"]
    assert cause in error.msg


def test_a_limit_per_key_that_cannot_be_counted_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found_for(LimitedPerKey) == found_for(LimitedPerKeyTransactional) == []
    monkeypatch.setattr(LimitedPerKey.delivery, "fair_by", None)
    assert found_for(LimitedPerKey) == ["queueapp.E048"]
    monkeypatch.setattr(connections["default"], "vendor", "microsoft")
    assert found_for(LimitedPerKeyTransactional) == ["queueapp.E048"]


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
        refused = (ClaimRecord._meta.model_name, KeyTokenBucket._meta.model_name)
        return False if model_name in refused else None


def test_a_limit_where_no_claim_can_be_recorded_is_an_error(settings: Any) -> None:
    settings.DATABASE_ROUTERS = [NoRecords()]
    assert found_for(Capped) == found_for(CappedOnce) == found_for(RatedPerKey) == ["queueapp.E044"]
    assert found_for(CappedTransactional) == found_for(InTurnsOnce) == []


def test_groups_in_sessions_of_another_isolation_level_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two members that end at once each would see the other wait, and the group would never complete."""
    options = connections["default"].settings_dict["OPTIONS"]
    for level, expected in (("READ_COMMITTED", []), ("REPEATABLE_READ", ["queueapp.E045"])):
        monkeypatch.setitem(options, "isolation_level", SimpleNamespace(name=level))
        assert found_for(Grouped) == expected


def test_requeue_after_deploy_where_nothing_shows_the_end_of_a_message_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for queue in (CappedTransactional, CappedOnce, ForeignPostgres):
        monkeypatch.setattr(queue.delivery, "requeue_after_deploy", 0)
    assert found_for(CappedTransactional) == []
    assert found_for(CappedOnce) == ["queueapp.E059"]
    assert found_for(ForeignPostgres) == ["queueapp.E059"]


def test_a_ledger_where_messages_come_or_go_uncounted_is_an_error(
    monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    for queue in (CappedOnce, Fenced, ForeignPostgres):
        monkeypatch.setattr(queue.delivery, "ledger", True)
        assert "queueapp.E051" in found_for(queue)
    assert found_for(Ledgered) == []
    monkeypatch.setattr(Ledgered.delivery, "delayed_in", ("elsewhere",))
    assert "queueapp.E051" in found_for(Ledgered)
    monkeypatch.setattr(Ledgered.delivery, "delayed_in", ())
    settings.QUEUEAPP = {"DELAYED_STORE": "tests.queueapp.delayed.stores.SampleStore"}
    assert "queueapp.E051" in found_for(Ledgered)
