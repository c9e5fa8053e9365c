"""What a process remembers of its leases, by a clock of the test's."""

from __future__ import annotations

import pytest

from queueapp.contrib.celery import in_flight as module
from queueapp.contrib.celery.in_flight import LeasedMessage, Leases
from tests.clock import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(100.0)
    monkeypatch.setattr(module, "monotonic", clock)
    return clock


def test_a_token_serves_the_claims_of_half_a_lease(clock: Clock) -> None:
    leases = Leases(lambda: None)
    first = leases.token(10.0)
    clock.now += 4.9
    assert leases.token(10.0) == first
    clock.now += 0.1
    second = leases.token(10.0)
    assert second != first

    assert leases.token(2.0) == second
    clock.now += 1.0
    assert leases.token(10.0) != second, "half of the shortest"


def test_the_leases_of_a_token_last_as_long_as_the_first_of_them(clock: Clock) -> None:
    leases = Leases(lambda: None)
    token = leases.token(10.0)
    leases.add(token, [1, 2], 99.0, 10.0, True)
    leases.add(token, [2, 3], 101.0, 10.0, True)

    assert leases.batches[token].expires == 109.0
    assert leases.outstanding == 3
    assert leases.received == 3, "one that came again was there already"

    leases.forget([LeasedMessage(seq, token) for seq in (1, 2, 3)])
    leases.add(token, [4], 103.0, 12.0, False)
    batch = leases.batches[token]
    assert (batch.expires, batch.period, batch.renews) == (115.0, 12.0, False)


def test_ended_messages_are_forgotten(clock: Clock) -> None:
    leases = Leases(lambda: None)
    old = leases.token(10.0)
    leases.add(old, [1, 2], 100.0, 10.0, True)
    clock.now += 5.0
    new = leases.token(10.0)
    leases.add(new, [3], 105.0, 10.0, True)

    leases.forget([LeasedMessage(1, old), LeasedMessage(3, new)])
    assert leases.outstanding == 1
    leases.forget([LeasedMessage(2, old), LeasedMessage(2, old)])
    assert leases.outstanding == 0
    assert list(leases.batches) == [new], "the others are never used again"


def test_the_first_of_many_acks_wakes_the_agent(clock: Clock) -> None:
    calls: list[float] = []
    leases = Leases(lambda: calls.append(clock.now))
    token = leases.token(10.0)
    assert leases.idle
    for seq in (1, 2):
        leases.ack(LeasedMessage(seq, token))
        clock.now += 1.0

    assert calls == [100.0]
    assert leases.unwritten_since == 100.0
    assert not leases.idle
