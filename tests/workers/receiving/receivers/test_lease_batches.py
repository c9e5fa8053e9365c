"""A leased batch: each message is covered by a renewal at every instant, and none is handled whose lease has lapsed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from time import monotonic
from typing import Any

import pytest
from django.db import connection

from queueapp import Context, consumer
from queueapp.sql import backend_of
from tests.in_process_worker import eventually, real_commits
from tests.testapp.messages import Nop
from tests.testapp.models import Leased
from tests.workers.receiving.batches import SingleReceiver
from workers.receiving.receivers import LeasedBatch, at_least_once, outcomes
from workers.services.lease_renewer import LeaseRenewer

pytestmark = [real_commits, pytest.mark.usefixtures("no_consumers")]


@pytest.fixture
def receiver(settings: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., SingleReceiver]:
    """Makes a receive task of ``Leased`` with this handler and lease."""

    def make(act: Callable[[Nop, Context], None], *, lease_ms: int = 5_000, **options: Any) -> SingleReceiver:
        # Handlers are slow where a test says so, and not because the machine is.
        settings.QUEUEAPP = {"RETRY_DELAY": 0, "BATCH_TARGET": 30, **options}
        monkeypatch.setattr(Leased.delivery, "lease_period", timedelta(milliseconds=lease_ms))

        @consumer(Leased, name="tests")
        def handler(message: Nop, context: Context) -> None:
            act(message, context)

        return SingleReceiver(Leased)

    return make


def send(count: int) -> list[int]:
    """Send so many messages; returns their seqs."""
    for number in range(1, count + 1):
        Leased.send(Nop(number, ""))
    return list(Leased.objects.order_by("seq").values_list("seq", flat=True))


# -- from waiting to in hand -------------------------------------------------------------------------------------------


def test_a_renewal_in_the_middle_of_the_hand_over_covers_the_message(
    receiver: Callable[..., SingleReceiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the instant after it has left those that wait, before anything else is done with it."""
    renewed: list[int] = []

    class Watched(deque[Any]):
        def popleft(self) -> Any:
            taken = super().popleft()
            if isinstance(taken, tuple):  # a message that waited; else one that is done
                one.batch.expires = monotonic()  # it is high time
                before = Leased.objects.get(seq=taken[0]).lease_expires
                renewals._round()
                assert Leased.objects.get(seq=taken[0]).lease_expires > before, "it was missed"
                renewed.append(taken[0])
            return taken

    monkeypatch.setattr(at_least_once, "deque", Watched)
    seqs = send(3)
    one = receiver(lambda message, context: None)
    renewals = LeaseRenewer("default", [one.pump])

    assert one.receive(3) == 3

    assert renewed == seqs
    assert not Leased.objects.exists()


def test_a_renewal_that_a_hand_over_overtakes_covers_the_message() -> None:
    """It happens between the two looks of the renewal: at what waits, and at what is in hand."""

    class Overtaking(deque[Any]):
        overtaken = False

        def __iter__(self) -> Iterator[Any]:
            if not self.overtaken:
                self.overtaken = True
                batch.in_flight.append(self[0][0])
                self.popleft()
            return super().__iter__()

    rows = [(seq, b"", "{}", None, 1) for seq in (1, 2, 3)]
    batch = LeasedBatch(object(), 0.0, ())  # type: ignore[arg-type]
    batch.waiting = Overtaking(rows)

    assert batch.leased() == {1, 2, 3}
    assert batch.in_flight == [1], "it happened"


def test_a_message_that_is_given_back_in_the_middle_of_the_hand_over_is_not_in_hand(
    receiver: Callable[..., SingleReceiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one that waits is seen by the task, and gone when it reaches for it."""
    observed: list[int] = []
    handled: list[int] = []

    class Taken(deque[Any]):
        def popleft(self) -> Any:
            if len(self) == 1 and isinstance(self[0], tuple):
                one.task.sql.acks.release(connection, one.batch.take_waiting(), one.batch.token, handled=False)
            return super().popleft()

    monkeypatch.setattr(at_least_once, "deque", Taken)
    seqs = send(2)
    one = receiver(lambda message, context: handled.append(context.seq))
    really = at_least_once.BatchSizer.observe

    def observe(self: Any, count: int, seconds: float, *, full: bool = True) -> None:
        observed.append(count)
        really(self, count, seconds, full=full)

    monkeypatch.setattr(at_least_once.BatchSizer, "observe", observe)

    one.receive(2)

    assert handled == seqs[:1]
    assert observed == [1], "and it is not counted as handled"
    (row,) = Leased.objects.all()
    assert (row.seq, row.deliveries, row.lease_token) == (seqs[1], 0, None)


def test_of_what_waits_each_is_taken_by_one_of_two_that_take_at_once() -> None:
    """The other one is faster: what was seen to wait is gone."""
    rows: Any = [(seq, b"", "{}", None, 1) for seq in (1, 2, 3)]
    batch = LeasedBatch(object(), 0.0, ())  # type: ignore[arg-type]
    others: list[int] = []

    class Shared(deque[Any]):
        def pop(self) -> Any:  # type: ignore[override]
            if len(self) == 2:
                others.extend(self.popleft()[0] for _ in range(2))
            return super().pop()

    batch.waiting = Shared(rows)

    assert batch.take_waiting() == [3]
    assert others == [1, 2]


def test_what_is_taken_out_of_a_batch_is_in_the_order_of_the_queue() -> None:
    """In which everybody locks rows; also what an ack that failed had put back."""
    rows: Any = [(seq, b"", "{}", None, 1) for seq in (1, 2, 3, 4)]
    batch = LeasedBatch(object(), 0.0, rows)  # type: ignore[arg-type]
    batch.done.extend([7, 5, 6])

    assert batch.take_waiting(keep=1) == [2, 3, 4]
    assert batch.take_done() == [5, 6, 7]


# -- leases that lapse -------------------------------------------------------------------------------------------------


def until_lapsed(context: Context) -> None:
    """Take longer than the lease, by the database's clock and by the worker's."""
    expires = Leased.objects.get(seq=context.seq).lease_expires
    assert expires is not None
    eventually(lambda: backend_of(connection).now(connection) > expires)


@pytest.mark.parametrize("target", [0.001, 10], ids=["a slow handler", "a fast one"])
def test_what_waits_when_the_lease_lapses_is_not_handled_beside_its_next_owner(
    receiver: Callable[..., SingleReceiver], caplog: pytest.LogCaptureFixture, target: float
) -> None:
    """Slow or fast is a matter of BATCH_TARGET: whether it would have looked at the clock at all."""
    calls: list[int] = []
    taken: list[int] = []

    def act(message: Nop, context: Context) -> None:
        calls.append(message.number)
        if message.number == 1:
            until_lapsed(context)
            with Leased.receive(10) as others:
                for other in others:
                    taken.append(other.body["number"])
                    other.ack()

    send(4)
    one = receiver(act, lease_ms=1_000, BATCH_TARGET=target)

    one.receive(4)

    assert taken == [1, 2, 3, 4]
    assert calls == [1]
    assert one.pump.stats.lost == 4
    assert "the lease of 3 waiting messages expired" in caplog.text


def test_what_waits_when_the_lease_lapses_and_has_no_other_owner_is_given_back_uncounted(
    receiver: Callable[..., SingleReceiver],
) -> None:
    calls: list[int] = []

    def act(message: Nop, context: Context) -> None:
        calls.append(message.number)
        if message.number == 1:
            until_lapsed(context)

    seqs = send(3)
    one = receiver(act, lease_ms=1_000)

    one.receive(3)

    assert calls == [1]
    rows = Leased.objects.order_by("seq").values_list("seq", "deliveries", "lease_token")
    assert list(rows) == [(seqs[1], 0, None), (seqs[2], 0, None)]
    assert one.pump.stats.lost == 0


def test_while_failures_are_recorded_what_is_acked_is_not_renewed(
    receiver: Callable[..., SingleReceiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recording may take long: what is still to be recorded is covered, and nothing is asked for that is gone."""
    covered: list[set[int]] = []

    def act(message: Nop, context: Context) -> None:
        if message.number > 1:
            raise ValueError(message.number)

    seqs = send(3)
    one = receiver(act)
    recover = outcomes.recover

    def recording(*given: Any) -> None:
        covered.append(one.batch.leased())
        recover(*given)

    monkeypatch.setattr(outcomes, "recover", recording)

    one.receive(3)

    assert covered == [set(seqs[1:]), set(seqs[1:])]


def test_only_a_lease_that_its_handler_has_shortened_is_renewed_out_of_turn(
    receiver: Callable[..., SingleReceiver],
) -> None:
    found: list[set[int]] = []

    def act(message: Nop, context: Context) -> None:
        for period in (None, timedelta(minutes=10), timedelta(seconds=5), timedelta(seconds=4)):
            context.extend(period)
            found.append(set(one.batch.renew_again))

    (seq,) = send(1)
    one = receiver(act, lease_ms=5_000)

    one.receive(1)

    assert found == [set(), set(), set(), {seq}]


def test_a_slow_handler_makes_those_after_it_end_their_messages_together_again(
    receiver: Callable[..., SingleReceiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock starts anew after it; else each of them would be acked by itself."""
    flushed: list[float] = []
    flush = at_least_once.AtLeastOnceReceiver.flush

    def act(message: Nop, context: Context) -> None:
        started = monotonic()
        while message.number == 1 and monotonic() < started + 1.1:
            pass

    def flushing(self: Any, *given: Any) -> None:
        flushed.append(monotonic())
        flush(self, *given)

    monkeypatch.setattr(at_least_once.AtLeastOnceReceiver, "flush", flushing)
    send(3)
    one = receiver(act, BATCH_TARGET=0.5)

    one.receive(3)

    assert len(flushed) == 1
