"""The renewal of leases waits for no lock, and ends what it took out of a batch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from time import monotonic

import pytest
from django.db import connection

from queueapp import consumer
from queueapp.models import Now
from tests.conformance.gate import Gate
from tests.in_process_worker import DEADLINE, Worker, eventually, real_commits
from tests.testapp.messages import Nop
from tests.testapp.models import Leased, Urgent
from tests.workers.receiving.single_receiver import SingleReceiver
from tests.workers.services.slow_handler import Slow, expiry, locked, locked_table, seqs_of
from workers.services import lease_renewer
from workers.services.lease_renewer import LeaseRenewer

pytestmark = [real_commits, pytest.mark.usefixtures("no_consumers", "fast")]
Start = Callable[..., Worker]


def test_behind_a_slow_handler_what_is_done_is_acked_and_what_waits_is_given_back(slow: Slow) -> None:
    _, _, third, fourth, fifth = slow.seqs
    with slow.handling():
        slow.renewals.start()
        eventually(lambda: seqs_of(Leased) == [third, fourth, fifth])
        eventually(lambda: slow.free() == [fourth, fifth])
        eventually(lambda: slow.receiver.batch.leased() == {third})
        stats = slow.receiver.pump.stats
        eventually(lambda: stats.returned == 2)  # counted after the batch is what is left of it

    assert seqs_of(Leased) == [fourth, fifth]
    assert slow.calls == [1, 2, 3]
    assert (stats.handled, stats.returned, stats.lost) == (3, 2, 0)


def test_a_handler_is_slow_after_half_a_second_and_not_before(slow: Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    with slow.handling():
        monkeypatch.setattr(lease_renewer, "SLOW_HANDLER_AFTER", 3_600.0)
        slow.look()
        assert seqs_of(Leased) == slow.seqs
        assert not slow.free()
        monkeypatch.undo()
        assert lease_renewer.SLOW_HANDLER_AFTER == 0.5
        eventually(lambda: (slow.look(), len(seqs_of(Leased)) == 3)[1])


def test_a_lease_is_renewed_once_half_of_its_period_is_over(slow: Slow) -> None:
    third = slow.seqs[2]
    with slow.handling():
        batch = slow.receiver.batch
        assert batch is not None
        Leased.objects.update(lease_expires=Now() + timedelta(seconds=batch.period / 2))
        before = expiry(Leased, third)

        batch.expires = monotonic() + batch.period / 2 + 5
        slow.look()
        assert expiry(Leased, third) == before

        asked = monotonic()
        batch.expires = asked + batch.period / 2 - 0.001
        slow.look()
        assert expiry(Leased, third) > before
        assert batch.expires >= asked + batch.period


def test_locked_rows_delay_no_other_and_follow_later(slow: Slow) -> None:
    first, _, third, fourth, fifth = slow.seqs
    with slow.handling():
        with locked(first, fourth):
            slow.renewals.start()
            eventually(lambda: seqs_of(Leased) == [first, third, fourth, fifth])
            eventually(lambda: slow.free() == [fifth])
            renewed = expiry(Leased, third)
            eventually(lambda: expiry(Leased, third) > renewed)
        eventually(lambda: seqs_of(Leased) == [third, fourth, fifth])
        eventually(lambda: slow.free() == [fourth, fifth])

    assert slow.calls == [1, 2, 3]
    assert slow.receiver.pump.stats.lost == 0


def test_what_was_locked_until_its_batch_was_over_is_acked_all_the_same(slow: Slow) -> None:
    first, _, _, fourth, fifth = slow.seqs
    with ExitStack() as lock:
        with slow.handling():
            lock.enter_context(locked(first))
            slow.look()
        assert seqs_of(Leased) == [first, fourth, fifth]
        slow.look()
    slow.look()

    assert seqs_of(Leased) == [fourth, fifth]
    assert slow.receiver.pump.stats.lost == 0
    assert slow.receiver.pump.stats.handled == 3


def test_what_is_locked_for_longer_than_its_lease_is_tried_as_long_as_its_batch_is_in_flight(slow: Slow) -> None:
    """It has no other owner as long as it is locked, and its lease may well last then."""
    first, *_ = slow.seqs
    with slow.handling():
        with locked(first):
            slow.watched.renews = False
            slow.receiver.batch.expires = monotonic() - 1
            slow.look()
        slow.look()
        assert first not in seqs_of(Leased)
        slow.receiver.batch.expires = monotonic() + 60

    assert slow.receiver.pump.stats.lost == 0


def test_what_is_not_ended_when_its_batch_and_its_lease_are_over_is_lost(
    slow: Slow, caplog: pytest.LogCaptureFixture
) -> None:
    first, *_ = slow.seqs
    with ExitStack() as lock:
        with slow.handling():
            batch = slow.receiver.batch
            lock.enter_context(locked(first))
            slow.look()
        slow.look()
        assert slow.receiver.pump.stats.lost == 0
        batch.expires = monotonic() - 1
        slow.look()

        assert slow.receiver.pump.stats.lost == 1
        assert slow.watched.pending == []
    assert f"1 lease expired before the ack (seq {first} to {first})" in caplog.text


def test_rows_locked_when_the_process_ends_are_reported_as_lost(slow: Slow, caplog: pytest.LogCaptureFixture) -> None:
    first, second, *_ = slow.seqs
    with ExitStack() as lock:
        with slow.handling():
            lock.enter_context(locked(first))
            slow.renewals.start()
            eventually(lambda: second not in seqs_of(Leased))
        assert slow.renewals.stop(DEADLINE)

    assert slow.receiver.pump.stats.lost == 1
    assert f"1 lease expired before the ack (seq {first} to {first})" in caplog.text


def test_what_is_unlocked_when_the_process_ends_is_acked_at_last(slow: Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, _, fourth, fifth = slow.seqs
    with ExitStack() as lock, slow.handling():
        lock.enter_context(locked(first))
        slow.renewals.start()
        eventually(lambda: second not in seqs_of(Leased))
        monkeypatch.setattr(slow.renewals, "renew_once", lambda: False)  # its next look would be too late
    assert slow.renewals.stop(DEADLINE)

    assert seqs_of(Leased) == [fourth, fifth]
    assert slow.receiver.pump.stats.lost == 0


# -- renewals ----------------------------------------------------------------------------------------------------------


def test_only_what_was_missed_is_asked_for_again(slow: Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_renewer, "SLOW_HANDLER_AFTER", 3_600.0)
    with slow.handling():
        batch = slow.receiver.batch
        batch.expires = monotonic()
        with locked(slow.seqs[2]):
            before = slow.expiries()
            slow.look()
            assert batch.renew_again == {slow.seqs[2]}
            assert [old < new for old, new in zip(before, slow.expiries(), strict=True)] == [
                True,
                True,
                False,
                True,
                True,
            ]

        before = slow.expiries()
        slow.look()

        assert [old < new for old, new in zip(before, slow.expiries(), strict=True)] == [
            False,
            False,
            True,
            False,
            False,
        ]
        assert batch.renew_again == set()


def test_a_look_that_failed_forgets_nothing_and_costs_no_connection(
    slow: Slow, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lease_renewer, "SLOW_HANDLER_AFTER", 3_600.0)
    with slow.handling():
        batch = slow.receiver.batch
        batch.renew_again.add(slow.seqs[2])
        session = connection.connection
        with locked_table(Leased):
            slow.renewals.renew_once()
        assert batch.renew_again == {slow.seqs[2]}
        assert slow.watched.paused_until > monotonic() - 60
        assert connection.connection is session
        assert "failed" not in caplog.text, "nothing has"

        before = slow.expiries()
        slow.watched.paused_until = 0.0
        slow.look()

        assert batch.renew_again == set()
        assert slow.expiries()[2] > before[2]


def test_a_table_that_a_migration_has_locked_holds_up_no_other_queue_of_the_same_look(slow: Slow, gate: Gate) -> None:
    @consumer(Urgent, name="tests")
    def handler(message: Nop) -> None:
        gate.enter()

    Urgent.send(Nop(1, ""))
    (seq,) = seqs_of(Urgent)
    second_single_receiver = SingleReceiver(Urgent)
    renewals = LeaseRenewer("default", [slow.receiver.pump, second_single_receiver.pump])
    with slow.handling(), second_single_receiver.receiving(1):
        eventually(lambda: gate.inside == 2)
        slow.receiver.batch.expires = second_single_receiver.batch.expires = monotonic()
        before = expiry(Urgent, seq)
        with locked_table(Leased):
            renewals.renew_once()
        assert expiry(Urgent, seq) > before
        gate.let(2)  # whichever of the two handlers is first


def test_however_short_a_lease_is_there_are_several_looks_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pump = SingleReceiver(Leased).pump
    renewals = LeaseRenewer("default", [pump])

    monkeypatch.setattr(Leased.delivery, "lease_period", timedelta(milliseconds=100))
    assert [renewals.interval(busy=busy) for busy in (True, False)] == pytest.approx([0.025, 0.025])
    for long in (timedelta(seconds=30), None):
        monkeypatch.setattr(Leased.delivery, "lease_period", long)
        assert [renewals.interval(busy=busy) for busy in (True, False)] == [0.1, 0.25]


def test_of_a_lease_that_another_owner_has_now_nothing_is_renewed_or_ended(slow: Slow) -> None:
    first, _, third, fourth, _ = slow.seqs
    with slow.handling():
        Leased.objects.update(lease_expires="2000-01-01T00:00:00Z")
        with Leased.receive(10, lease_period=timedelta(hours=1)) as rest:
            taken = {message.seq: message for message in rest}
            before = {seq: expiry(Leased, seq) for seq in (first, third, fourth)}
            slow.renewals.start()
            eventually(lambda: not slow.receiver.batch.waiting)
            eventually(lambda: slow.receiver.batch.renew_again)
            assert slow.renewals.stop(DEADLINE)
            assert {seq: expiry(Leased, seq) for seq in before} == before
            for message in taken.values():
                message.ack()

    assert slow.calls == [1, 2, 3]
    assert not Leased.objects.exists()
