"""Options of leases, limits and expiry that contradict each other are said at start, each with its id."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from queueapp import ExpirationModel, KeepAsPoison, Leasing, PublishTo, checks
from tests.testapp.leases import AgingByLatest, AgingByQueue, Deferring, Forever
from tests.testapp.models import AtMostOnce, ForeignPostgres, Leased, Transactional

DAY = timedelta(days=1)
CASES: list[tuple[str, Any, dict[str, Any], str]] = [
    ("queueapp.E030", Transactional, {"leasing": Leasing.STRICT}, "leasing is strict, but its semantics, "
                                                                  "transactional, has no leases"),
    ("queueapp.E030", AtMostOnce, {"leasing": Leasing.SUBLET}, "leasing is sublet"),
    ("queueapp.E031", ForeignPostgres, {"expiration_model": ExpirationModel.LATEST}, "but its table has no "
                                                                                     "enqueued_at"),
    ("queueapp.E032", AtMostOnce, {"deferred_ack_expiration": DAY}, "who receives one of its messages (at-most-once) "
                                                                    "ends it"),
    ("queueapp.E033", Deferring, {"leasing": Leasing.FENCED}, "its leasing is fenced"),
    ("queueapp.E034", Leased, {"on_expired": PublishTo("Leased")}, "to 'Leased', which it collects itself"),
    ("queueapp.E035", Transactional, {"expire_leased": True}, "has expire_leased"),
    ("queueapp.W030", AtMostOnce, {"max_deliveries": 2, "max_cancels": 3}, "sets max_deliveries and max_cancels, but "
                                                                           "is at-most-once"),
    ("queueapp.W030", AtMostOnce, {"max_cancels": 3}, "sets max_cancels, but"),
    ("queueapp.W031", Transactional, {"lease_period": None}, "leases that never expire"),
    ("queueapp.W032", AgingByQueue, {"expiration": None}, "expiration_model is queue, and it has no expiration"),
    ("queueapp.W032", AgingByLatest, {"expiration": None}, "expiration_model is latest"),
    ("queueapp.W033", Forever, {"given": {"renew_leases": True}}, "renews leases that never expire"),
]  # fmt: skip


def found() -> list[tuple[str, Any, str]]:
    return [(finding.id, finding.obj, finding.msg) for finding in checks.check_leases()]


def test_the_queues_of_the_tests_contradict_nothing() -> None:
    assert found() == []


@pytest.mark.parametrize(
    ("number", "queue", "options", "text"), CASES, ids=[f"{case[0]}-{case[1].__name__}" for case in CASES]
)
def test_a_contradiction_is_named(
    number: str, queue: Any, options: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in options.items():
        monkeypatch.setattr(queue.delivery, name, value)

    ((identity, of, said),) = found()

    assert (identity, of) == (number, queue)
    assert said.startswith(f"{queue._meta.label}: ")
    assert text in said


@pytest.mark.parametrize(
    ("queue", "options"),
    [
        (Leased, {"leasing": Leasing.STRICT, "max_cancels": 2, "expire_leased": True, "on_expired": KeepAsPoison()}),
        (Transactional, {"max_deliveries": 3, "max_cancels": 3}),
        (Deferring, {"leasing": Leasing.STRICT}),
        (ForeignPostgres, {"expiration": DAY}),
    ],
    ids=["leased", "transactional", "deferring", "foreign"],
)
def test_what_contradicts_nothing_is_none(queue: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in options.items():
        monkeypatch.setattr(queue.delivery, name, value)
    assert found() == []


def test_publishing_in_a_circle_is_an_error_of_each_queue_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Leased.delivery, "on_expired", PublishTo("Deferring"))
    monkeypatch.setattr(Deferring.delivery, "on_expired", PublishTo("AtMostOnce"))
    monkeypatch.setattr(AtMostOnce.delivery, "on_expired", PublishTo("Deferring"))
    assert {(key, queue) for key, queue, _ in found()} == {("queueapp.E034", Deferring), ("queueapp.E034", AtMostOnce)}
    monkeypatch.setattr(AtMostOnce.delivery, "on_expired", PublishTo("Leased"))
    of_leased = next(text for _, queue, text in found() if queue is Leased)
    assert "comes back to it by testapp.Deferring, testapp.AtMostOnce" in of_leased


def test_publishing_to_others_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Leased.delivery, "on_expired", PublishTo("late"))
    assert found() == []
