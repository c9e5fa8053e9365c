"""What a claim on a queue with a fairness model costs, and when it shares out."""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.db.models import F

from queueapp.conf import settings
from queueapp.flow.limited_claims import KNOWN_FOR, ClaimResult, LimitedClaims
from queueapp.messages import new_id
from queueapp.models import Now, Subscriber
from queueapp.operations import control
from queueapp.sql import queue_sql
from queueapp.sql.claims import SEQ, SeqRange
from tests.testapp.models import Capped, InProportion

pytestmark = pytest.mark.django_db

SUBJECTS = ("claims", "limits")


class StatementSpy:
    """The statements of a queue; ``used`` has the names of the verbs that were called."""

    def __init__(self, sql: Any, used: list[str] | None = None) -> None:
        self._sql = sql
        self.used: list[str] = [] if used is None else used

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._sql, name)
        if name in SUBJECTS:
            return StatementSpy(found, self.used)
        self.used.append(name)
        return found


@pytest.fixture
def spy() -> StatementSpy:
    return StatementSpy(queue_sql(InProportion, connection))


@pytest.fixture
def taking(spy: StatementSpy, monkeypatch: pytest.MonkeyPatch) -> LimitedClaims:
    """What is known of subscribers is known until the test says otherwise."""
    monkeypatch.setattr("queueapp.flow.limited_claims.KNOWN_FOR", 3600.0)
    return LimitedClaims(InProportion, "default", spy)  # type: ignore[arg-type]


def subscribe(backlog: int, **columns: Any) -> uuid.UUID:
    row = {"queue": InProportion._meta.label, "host": "h", "process": 1, "supervisor": new_id(), "backlog": backlog,
           "alive_until": Now() + timedelta(hours=1)} | columns  # fmt: skip
    return Subscriber.objects.create(id=new_id(), **row).pk


def take(taking: LimitedClaims, owner: uuid.UUID, limit: int) -> ClaimResult:
    return taking.take(connection, [SeqRange()], limit, new_id(), owner, 3_600_000, bounded=True)


def test_fairness_model_costs_a_full_queue_one_look_before_each_claim(taking: LimitedClaims, spy: StatementSpy) -> None:
    subscription, _ = subscribe(3), subscribe(4)
    InProportion.send_many({"n": n} for n in range(12))
    assert len(take(taking, subscription, 2).rows) == 2
    spy.used.clear()

    assert len(take(taking, subscription, 1).rows) == 1

    assert spy.used == ["peek", "claim_by_lease"]


def test_fairness_model_shares_out_as_soon_as_there_is_less_than_room(taking: LimitedClaims, spy: StatementSpy) -> None:
    first, second = subscribe(3), subscribe(4)
    InProportion.send_many({"n": n} for n in range(9))
    assert [row[SEQ] for row in take(taking, first, 3).rows] == sorted(
        InProportion.objects.values_list("seq", flat=True)
    )[:3]
    InProportion.objects.filter(lease_owner=first).delete()

    taken = take(taking, first, 3)  # 6 are left, of 7 that both may hold

    assert "share_out" in spy.used
    owners = list(InProportion.objects.exclude(lease_owner=None).values_list("lease_owner", flat=True))
    assert (owners.count(first), owners.count(second)) == (3, 3)
    assert len(taken.rows) == 3


def test_fairness_model_what_was_shared_out_is_taken_up_though_there_is_more_than_room_now(
    taking: LimitedClaims,
) -> None:
    subscription, _ = subscribe(2), subscribe(2)
    InProportion.send_many({"n": n} for n in range(2))
    assert take(taking, subscription, 2).rows  # the other one has the second
    first = InProportion.objects.filter(lease_owner=subscription)
    first.update(lease_token=F("lease_owner"))
    InProportion.send_many({"n": n} for n in range(20))
    taking.known_until = 0.0  # as after KNOWN_FOR

    taken = take(taking, subscription, 2)

    assert [row[SEQ] for row in taken.rows] == list(first.values_list("seq", flat=True))
    assert KNOWN_FOR < 1


@pytest.mark.parametrize("columns", [{"filter": "/n > 3"}, {"alive_until": Now() - timedelta(hours=1)}])
def test_fairness_model_is_asked_where_a_filter_or_a_late_heartbeat_decides(
    taking: LimitedClaims, spy: StatementSpy, columns: dict[str, Any]
) -> None:
    subscription, _ = subscribe(2, **columns), subscribe(2)
    InProportion.send_many({"n": n} for n in range(20))

    taken = take(taking, subscription, 2)

    assert "lock" in spy.used
    assert "claim_by_lease" not in spy.used
    assert len(taken.rows) == (2 if "filter" in columns else 0)


def test_max_backlog_is_counted_however_much_there_is() -> None:
    spy = StatementSpy(queue_sql(Capped, connection))
    Capped.send_many({"n": n} for n in range(20))

    assert len(take(LimitedClaims(Capped, "default", spy), new_id(), 9).rows) == 5  # type: ignore[arg-type]

    assert spy.used.count("claim_within") == 1


def test_fairness_model_takes_a_subscriber_with_a_backlog_of_0_for_none(
    taking: LimitedClaims, spy: StatementSpy
) -> None:
    subscription, _ = subscribe(2), subscribe(0)
    InProportion.send_many({"n": n} for n in range(20))
    assert len(take(taking, subscription, 1).rows) == 1
    assert "lock" not in spy.used

    filtered = subscribe(2, filter="/n > 5")
    taking.known_until = 0.0
    Subscriber.objects.filter(pk=subscription).delete()

    assert len(take(taking, filtered, 2).unassigned) == 5, "what the idle consumer would pass is unassigned"


def test_fairness_model_who_is_given_something_is_woken_and_has_until_it_would_be_dead(
    taking: LimitedClaims, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = subscribe(2), subscribe(2)
    woken: list[Any] = []
    InProportion.send_many({"n": n} for n in range(2))
    control.set_option(InProportion, "lease_period", timedelta(hours=1))
    monkeypatch.setattr("queueapp.flow.limited_claims.notifier.sent", lambda queue, connection: woken.append(queue))

    take(taking, first, 2)

    assert woken == [InProportion]
    until = InProportion.objects.filter(lease_owner=second).annotate(left=F("lease_expires") - Now()).get().left
    assert timedelta() < until <= settings.DEAD_AFTER


def test_reached_max_backlog_of_a_fairness_model_is_reported(taking: LimitedClaims, delivery: Any) -> None:
    delivery(InProportion, max_backlog=2)
    first, second = subscribe(2), subscribe(2)
    InProportion.send_many({"n": n} for n in range(9))
    assert [len(take(taking, first, 2).rows), len(take(taking, second, 2).rows)] == [1, 1]

    taken = take(taking, first, 1)

    assert (taken.rows, taken.at_limit) == ([], True)
