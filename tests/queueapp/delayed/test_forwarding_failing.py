"""Forwarding when something goes wrong in the middle, several queues in one database, and the rounds of a forwarder."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from django.db import Error, connections
from django.test import override_settings

from queueapp import delayed
from queueapp.models import DelayedMessage, ForwardedMessage, Now, PoisonMessage
from queueapp.services import delayed_dispatcher as services
from queueapp.services.delayed_dispatcher import SWEEP_INTERVAL, SWEEP_PERIOD, Forwarder
from tests.crash.rig.two_databases import TwoDatabases
from tests.crash.workload.routes import WAREHOUSE, Routes
from tests.queueapp.delayed.forwarded import ADDRESS, HOUR, NOW, failing, forward, healthy, keep, old_notes, there
from tests.testapp.models import AtMostOnce, Transactional, Urgent

pytestmark = pytest.mark.usefixtures("two")


# -- what is not the messages' fault -----------------------------------------------------------------------------------


def test_while_nothing_is_due_a_target_that_is_away_is_not_asked(two: TwoDatabases) -> None:
    keep(delay=HOUR)
    connections[WAREHOUSE].close()
    two.here.server.execute(f"ALTER DATABASE {two.there.name} ALLOW_CONNECTIONS false")

    assert forward() == (0, 0, 0)

    two.here.server.execute(f"ALTER DATABASE {two.there.name} ALLOW_CONNECTIONS true")


def test_the_target_is_connected_to_before_anything_is_locked_and_waited_for_under_watch() -> None:
    seen: list[tuple[bool, bool]] = []

    @contextmanager
    def waiting(connection: Any) -> Iterator[None]:
        yield
        seen.append((connections["default"].in_atomic_block, connection.connection is not None))

    connections[WAREHOUSE].close()
    keep()

    assert forward(waiting=waiting) == (1, 0, 0)

    assert seen == [(False, True), (True, True)]


@pytest.mark.parametrize("code", ["42501", "55P03", "08006"], ids=["denied", "locked", "connection"])
def test_what_a_target_states_of_itself_counts_against_no_message(two: TwoDatabases, code: str) -> None:
    failing(two, "testapp_transactional", code)
    keep()

    with pytest.raises(delayed.DispatchFailed, match="refused here"):
        forward()

    assert DelayedMessage.objects.get().retries == 0
    assert not PoisonMessage.objects.exists()


def test_a_table_of_arrivals_that_takes_no_notes_counts_against_no_message(two: TwoDatabases) -> None:
    failing(two, "queueapp_forwardedmessage", "23514")
    keep()

    with pytest.raises(delayed.DispatchFailed, match="refused here"):
        forward()

    assert DelayedMessage.objects.get().retries == 0
    assert not PoisonMessage.objects.exists()


def test_a_target_that_fails_after_it_refused_one_is_no_fault_of_the_others(two: TwoDatabases) -> None:
    """The whole batch is refused because of its second, and one by one the first meets a lock."""
    failing(two, "testapp_transactional", "23514", "NEW.correlationid = 'refused'")
    keep()
    keep(correlation_id="refused")
    calls: list[Any] = []

    @contextmanager
    def waiting(connection: Any) -> Iterator[None]:
        calls.append(connection)
        if len(calls) == 3:  # to connect, all at once, the first alone
            healthy(two)
            failing(two, "testapp_transactional", "55P03")
        yield

    with pytest.raises(delayed.DispatchFailed):
        forward(waiting=waiting)

    assert [row.retries for row in DelayedMessage.objects.all()] == [0, 0]
    assert not PoisonMessage.objects.exists()


@pytest.mark.parametrize(
    ("code", "raised"), [("55P03", delayed.DispatchFailed), ("40P01", Error)], ids=["locked", "deadlock"]
)
def test_what_had_gone_over_when_the_target_failed_is_out_of_the_store(
    two: TwoDatabases, code: str, raised: type[Exception]
) -> None:
    ids = [keep(b"x" * 40_000) for _ in range(3)]
    calls: list[Any] = []

    @contextmanager
    def waiting(connection: Any) -> Iterator[None]:
        calls.append(connection)
        if len(calls) == 3:  # to connect, the first piece, the second
            failing(two, "testapp_transactional", code)
        yield

    with override_settings(QUEUEAPP={"MAX_BATCH_BYTES": 64 * 1024}):
        with pytest.raises(raised, match="refused here"):
            forward(waiting=waiting)
        assert {row.message_id for row in DelayedMessage.objects.all()} == set(ids[1:])
        healthy(two)
        assert forward() == (2, 0, 0)

    assert [row.id for row in there()] == ids


def test_a_refusal_that_cannot_be_recovered_changes_nothing_in_the_store(two: TwoDatabases) -> None:
    failing(two, "testapp_transactional", "23514")
    keep()
    two.here.execute("ALTER TABLE queueapp_poisonmessage RENAME TO later")

    with pytest.raises(delayed.RecoveryFailed):
        forward()

    assert DelayedMessage.objects.get().retries == 0


def test_what_was_due_first_arrives_first() -> None:
    ids = [keep() for _ in range(4)]
    for number, identity in enumerate(ids, 1):
        DelayedMessage.objects.filter(message_id=identity).update(due=Now() - timedelta(minutes=number))

    assert forward() == (4, 0, 0)

    assert [row.id for row in there()] == ids[::-1]


def test_the_workers_of_the_queue_there_are_woken(two: TwoDatabases) -> None:
    keep()
    with two.there.server.connect(two.there.name) as ear:
        ear.execute("LISTEN queueapp")
        forward()
        heard = [note.payload for note in ear.notifies(timeout=10, stop_after=1)]

    assert heard == ["testapp.Transactional"]


# -- a target that cannot tell -----------------------------------------------------------------------------------------


class NoArrivals(Routes):
    def allow_migrate(self, db: str, app_label: str, model_name: str | None = None, **hints: Any) -> bool | None:
        return False if db == WAREHOUSE and model_name == "forwardedmessage" else None


def test_a_target_without_our_tables_is_worked_with_and_named_once(
    two: TwoDatabases, caplog: pytest.LogCaptureFixture
) -> None:
    two.there.execute("ALTER TABLE queueapp_forwardedmessage RENAME TO none_of_ours")
    with override_settings(DATABASE_ROUTERS=[NoArrivals()]):
        for _ in range(2):
            keep()
            assert forward() == (1, 0, 0)
        assert delayed.forget_arrivals("default", WAREHOUSE) == 0

    assert len(there()) == 2
    assert caplog.text.count("may be there twice after a crash") == 1


def test_notes_are_forgotten_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delayed.forward, "_AT_ONCE", 2)
    ids = [keep() for _ in range(6)]
    row = DelayedMessage.objects.get(message_id=ids[0])
    forward()
    row.save(force_insert=True)
    old_notes()

    assert delayed.forget_arrivals("default", WAREHOUSE) == 5

    assert [message.message_id for message in ForwardedMessage.objects.using(WAREHOUSE).all()] == ids[:1]


# -- several queues of one database ------------------------------------------------------------------------------------

MORE = (Transactional, AtMostOnce, Urgent)


class ThreeThere(Routes):
    def db_for_write(self, model: Any, **hints: Any) -> str | None:
        return WAREHOUSE if model in MORE else super().db_for_write(model, **hints)


@pytest.fixture
def three(two: TwoDatabases, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Three queues lie there, with two messages each that are due, and one that is not."""
    with override_settings(DATABASE_ROUTERS=[ThreeThere()]):
        for queue in MORE:
            monkeypatch.setattr(queue.delivery, "delayed_in", ("default",))
        for hours, queue in enumerate(MORE, 1):
            for delay in (NOW, NOW, HOUR * hours):
                queue.send({}, delay=delay, delayed_in="default")
        yield


@pytest.mark.usefixtures("three")
def test_a_round_moves_no_more_than_its_limit_of_all_queues_together() -> None:
    moved = [delayed.forward_due("default", WAREHOUSE, limit).moved for limit in (3, 4, 4)]

    assert moved == [3, 3, 0]
    assert DelayedMessage.objects.filter(due__lte=Now()).count() == 0
    remaining = delayed.next_forward_in("default", WAREHOUSE)
    assert remaining is not None
    assert remaining <= HOUR, "of all queues"


@pytest.mark.usefixtures("three")
def test_a_round_that_the_target_breaks_off_reports_it_whatever_is_due_for_other_queues(two: TwoDatabases) -> None:
    DelayedMessage.objects.filter(destination=ADDRESS, due__lte=Now()).update(due=Now() - HOUR)
    failing(two, "testapp_transactional", "55P03")

    with pytest.raises(delayed.DispatchFailed):
        forward()

    remaining = DelayedMessage.objects.filter(due__lte=Now())
    assert set(remaining.values_list("destination", flat=True)) == {ADDRESS}, "those of other queues were forwarded"


# -- rounds ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def mover() -> Forwarder:
    return Forwarder("default", WAREHOUSE, uuid.uuid4())


def test_forwarders_to_two_databases_lead_side_by_side(mover: Forwarder) -> None:
    assert mover.elector.try_lead()
    assert Forwarder("default", "elsewhere", uuid.uuid4()).elector.try_lead()
    assert not Forwarder("default", WAREHOUSE, uuid.uuid4()).elector.try_lead()


def test_a_refusal_is_of_its_own_round(two: TwoDatabases, mover: Forwarder) -> None:
    failing(two, "testapp_transactional", "23514", "NEW.correlationid = 'refused'")
    keep(correlation_id="refused")
    mover.dispatch_once()
    assert mover.dispatch_breaker.failures == 1

    keep()
    mover.dispatch_once()

    assert (mover.dispatched, mover.dispatch_breaker.failures) == (1, 0)


def test_it_waits_no_longer_than_until_the_next_one_is_due(mover: Forwarder) -> None:
    with override_settings(QUEUEAPP={"DISPATCH_INTERVAL": 60}):
        assert mover.dispatch_once() == 60
        keep(delay=timedelta(seconds=20))
        assert 0 < mover.dispatch_once() <= 20


def test_waiting_for_the_target_is_watched(mover: Forwarder, monkeypatch: pytest.MonkeyPatch) -> None:
    watched: list[str] = []

    @contextmanager
    def answering(connection: Any) -> Iterator[None]:
        watched.append(connection.alias)
        yield

    monkeypatch.setattr(services, "ResponseDeadline", answering)
    keep()
    mover.dispatch_once()

    assert watched == [WAREHOUSE] * 3, "to connect, to deliver, to sweep"


def test_notes_are_swept_now_and_then_for_as_long_as_there_may_be_some(
    mover: Forwarder, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, swept = [1000.0], []
    monkeypatch.setattr(services, "monotonic", lambda: now[0])
    monkeypatch.setattr(delayed, "forget_arrivals", lambda *given: swept.append(now[0]))

    def rounds(*seconds: float) -> list[float]:
        swept.clear()
        begun = now[0]
        for second in seconds:
            now[0] = begun + second
            mover.dispatch_once()
        return [item - begun for item in swept]

    assert rounds(0, 1, SWEEP_INTERVAL - 1, SWEEP_INTERVAL, SWEEP_INTERVAL + 1) == [0, SWEEP_INTERVAL]
    assert rounds(SWEEP_PERIOD + 1, SWEEP_PERIOD + SWEEP_INTERVAL + 2) == [], "there cannot be any"
    keep()
    assert rounds(2 * SWEEP_INTERVAL, 2 * SWEEP_INTERVAL + 1, 3 * SWEEP_INTERVAL) == [
        2 * SWEEP_INTERVAL,
        3 * SWEEP_INTERVAL,
    ]


def test_a_sweep_that_fails_is_the_targets_fault_and_one_that_works_its_recovery(
    two: TwoDatabases, mover: Forwarder
) -> None:
    two.there.execute("ALTER TABLE queueapp_forwardedmessage RENAME TO later")
    with pytest.raises(delayed.DispatchFailed) as raised:
        mover.dispatch_once()
    assert mover.failed(raised.value, mover.dispatch_breaker) > 0
    assert mover.dispatch_breaker.failures == 1
    assert connections[WAREHOUSE].connection is None, "the next round has a new one"

    two.there.execute("ALTER TABLE later RENAME TO queueapp_forwardedmessage")
    mover.sweep_at = 0.0
    mover.dispatch_once()

    assert mover.dispatch_breaker.failures == 0


def test_after_a_deadlock_in_the_target_the_same_is_tried_again_at_once(two: TwoDatabases, mover: Forwarder) -> None:
    failing(two, "testapp_transactional", "40P01")
    keep()
    with pytest.raises(Error) as raised:
        mover.dispatch_once()

    assert mover.failed(raised.value, mover.fetch_breaker) < 0.1

    assert mover.fetch_breaker.failures == 0
