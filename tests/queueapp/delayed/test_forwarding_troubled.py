"""Forwarding past what keeps some of the messages from going over: the others go, and none is lost, doubled or
blamed."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from django.core import checks
from django.db import connection, connections
from django.test import override_settings
from django.test.utils import CaptureQueriesContext

from queueapp import delayed, signals
from queueapp.delayed import SqlDelayedStore
from queueapp.failures import poison_operations
from queueapp.models import DelayedMessage, ForwardedMessage, Now, PoisonMessage
from queueapp.services.delayed_dispatcher import DelayedDispatcher, Forwarder
from queueapp.services.service import stop_all
from tests.crash.rig.two_databases import TwoDatabases
from tests.crash.workload.routes import WAREHOUSE, Routes
from tests.in_process_worker import DEADLINE, eventually
from tests.queueapp.delayed.forwarded import ADDRESS, HOUR, NOW, failing, forward, healthy, keep, there
from tests.testapp.models import Leased, Transactional, Urgent

pytestmark = pytest.mark.usefixtures("two")


@pytest.fixture
def mover() -> Forwarder:
    return Forwarder("default", WAREHOUSE, uuid.uuid4())


# -- a server that has no room or time ---------------------------------------------------------------------------------


@pytest.mark.parametrize("code", ["53100", "53200", "57014", "57P04", "58030"])
def test_a_target_without_room_memory_or_time_makes_no_poison_of_what_is_due(two: TwoDatabases, code: str) -> None:
    failing(two, "testapp_transactional", code)
    keep()
    keep()

    with pytest.raises(delayed.DispatchFailed, match="refused here"):
        forward()

    assert [row.retries for row in DelayedMessage.objects.all()] == [0, 0]
    assert not PoisonMessage.objects.exists()
    healthy(two)
    assert forward() == (2, 0, 0)


def test_what_takes_too_long_together_goes_over_one_by_one(two: TwoDatabases) -> None:
    two.there.execute(
        "CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN IF (SELECT count(*) FROM fresh) > 1 THEN "
        "RAISE EXCEPTION 'too many' USING ERRCODE = '57014'; END IF; RETURN NULL; END$$"
    )
    two.there.execute(
        "CREATE TRIGGER fail AFTER INSERT ON testapp_transactional REFERENCING NEW TABLE AS fresh "
        "FOR EACH STATEMENT EXECUTE FUNCTION fail()"
    )
    ids = [keep() for _ in range(3)]

    assert forward() == (3, 0, 0)

    assert [row.id for row in there()] == ids


def test_as_many_are_read_at_once_as_a_batch_may_have_bytes() -> None:
    with override_settings(QUEUEAPP={"MAX_BATCH_BYTES": 64 * 1024}):
        for _ in range(8):
            keep(b"x" * 30_000)
        with CaptureQueriesContext(connection) as queries:
            assert forward() == (8, 0, 0)

    reads = [query["sql"] for query in queries if query["sql"].startswith("SELECT") and " IN (" in query["sql"]]
    assert max(read.partition(" IN (")[2].partition(")")[0].count(",") + 1 for read in reads) == 2


# -- one queue of several ----------------------------------------------------------------------------------------------


class TwoThere(Routes):
    def db_for_write(self, model: Any, **hints: Any) -> str | None:
        return WAREHOUSE if model is Urgent else super().db_for_write(model, **hints)


@pytest.fixture
def both(two: TwoDatabases, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two queues lie there; what is for the first has been due for longer."""
    monkeypatch.setattr(Urgent.delivery, "delayed_in", ("default",))
    with override_settings(DATABASE_ROUTERS=[TwoThere()]):
        for _ in range(3):
            keep()
        DelayedMessage.objects.update(due=Now() - HOUR)
        Urgent.send({}, delay=NOW, delayed_in="default")
        yield


@pytest.mark.usefixtures("both")
@pytest.mark.parametrize("trouble", ["missing", "denied"])
def test_a_queue_whose_table_is_missing_or_closed_keeps_none_of_the_others_waiting(
    two: TwoDatabases, trouble: str
) -> None:
    if trouble == "missing":
        two.there.execute("ALTER TABLE testapp_transactional RENAME TO later")
    else:
        failing(two, "testapp_transactional", "42501")

    # Its backlog is more than a round moves.
    with pytest.raises(delayed.DispatchFailed):
        delayed.forward_due("default", WAREHOUSE, 2)

    assert set(DelayedMessage.objects.values_list("destination", "retries")) == {(ADDRESS, 0)}
    assert DelayedMessage.objects.count() == 3
    assert two.there.execute("SELECT count(*) FROM testapp_urgent") == [(1,)]


@pytest.mark.usefixtures("both")
def test_a_version_that_knows_of_more_queues_there_has_a_leader_of_its_own(
    mover: Forwarder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Urgent.delivery, "delayed_in", ())
    old = Forwarder("default", WAREHOUSE, uuid.uuid4())

    assert old.elector.try_lead()
    assert mover.elector.try_lead()
    assert not Forwarder("default", WAREHOUSE, uuid.uuid4()).elector.try_lead(), "of one version there is one"


# -- which message it is -----------------------------------------------------------------------------------------------


def test_one_of_another_store_with_the_same_id_and_number_is_another_message() -> None:
    """A store counts from 1, as every other does, and senders may make their ids of what a message is about."""
    identity = uuid.uuid4()
    keep(message_id=identity)
    row = DelayedMessage.objects.get()
    assert forward() == (1, 0, 0)

    row.stored_at += timedelta(microseconds=1)
    row.save(force_insert=True)

    assert forward() == (1, 0, 0)
    assert [row.id for row in there()] == [identity, identity]
    assert ForwardedMessage.objects.using(WAREHOUSE).count() == 2


def test_of_two_that_were_stored_at_the_same_moment_under_one_id_both_arrive() -> None:
    """As poison that goes back, in one statement."""
    identity = uuid.uuid4()
    keep(message_id=identity)
    keep(message_id=identity)
    DelayedMessage.objects.update(stored_at=DelayedMessage.objects.values_list("stored_at", flat=True)[0])

    assert forward() == (2, 0, 0)

    assert [row.id for row in there()] == [identity, identity]


def test_nothing_is_reported_of_what_arrives_for_the_first_time(caplog: pytest.LogCaptureFixture) -> None:
    keep()

    assert forward() == (1, 0, 0)

    assert "had arrived there already" not in caplog.text


# -- a refusal that cannot be recovered --------------------------------------------------------------------------------


class NoArrivals(Routes):
    def allow_migrate(self, db: str, app_label: str, model_name: str | None = None, **hints: Any) -> bool | None:
        return False if db == WAREHOUSE and app_label == "queueapp" else None


def test_a_refusal_that_cannot_be_recovered_sends_no_other_message_with_each_round(two: TwoDatabases) -> None:
    failing(two, "testapp_transactional", "23514", "NEW.correlationid = 'refused'")
    two.here.execute("ALTER TABLE queueapp_poisonmessage RENAME TO later")
    keep()
    refused = keep(correlation_id="refused")

    with override_settings(DATABASE_ROUTERS=[NoArrivals()]):
        for _ in range(3):
            with pytest.raises(delayed.RecoveryFailed):
                forward()

    assert len(there()) == 1
    assert [(row.message_id, row.retries) for row in DelayedMessage.objects.all()] == [(refused, 0)]


def test_a_refusal_that_cannot_be_counted_takes_nothing_back_of_what_has_gone_over(two: TwoDatabases) -> None:
    failing(two, "testapp_transactional", "23514", "NEW.correlationid = 'refused'")
    two.here.execute(
        "CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN RAISE EXCEPTION 'no count'; END$$"
    )
    two.here.execute(
        "CREATE TRIGGER fail BEFORE UPDATE ON queueapp_delayedmessage FOR EACH ROW EXECUTE FUNCTION fail()"
    )
    keep()
    refused = keep(correlation_id="refused")

    with override_settings(QUEUEAPP={"NUMBER_OF_RETRIES": 1}), pytest.raises(delayed.RecoveryFailed, match="no count"):
        forward()

    assert len(there()) == 1
    assert DelayedMessage.objects.get().message_id == refused


# -- beside it ---------------------------------------------------------------------------------------------------------


class Derived(SqlDelayedStore):
    """A store that does something more."""


@pytest.fixture
def derived(settings: Any) -> None:
    settings.QUEUEAPP = {"DELAYED_STORE": f"{__name__}.Derived", "DISPATCH_INTERVAL": 60}


@pytest.mark.usefixtures("derived")
def test_a_store_derived_from_the_tables_leaves_what_is_to_be_forwarded_alone() -> None:
    keep()
    Leased.send({}, delay=NOW)

    assert DelayedDispatcher("default", uuid.uuid4()).dispatch_once() == 60, "nor does it wait for it"

    assert Leased.objects.count() == 1
    assert not PoisonMessage.objects.exists()
    assert forward() == (1, 0, 0)


def test_poison_that_is_sent_to_a_queue_of_another_database_is_forwarded(two: TwoDatabases) -> None:
    """Also where that database has a table of the same name."""
    Leased.send({})
    Leased.objects.all().delete()
    poison_of = PoisonMessage(
        queue="testapp.Leased", message_id=uuid.uuid4(), headers="{}", body=b"", reason="x", attempts=1
    )
    PoisonMessage.objects.bulk_create([poison_of])

    assert poison_operations.requeue(PoisonMessage.objects.all(), to=Transactional) == 1

    assert two.here.execute("SELECT count(*) FROM testapp_transactional") == [(0,)]
    assert DelayedMessage.objects.get().destination == ADDRESS
    assert forward() == (1, 0, 0)
    assert len(there()) == 1


def test_a_sweep_that_fails_takes_nothing_from_what_its_round_has_done(two: TwoDatabases, mover: Forwarder) -> None:
    two.there.execute("CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN RAISE EXCEPTION 'no'; END$$")
    two.there.execute(
        "CREATE TRIGGER fail BEFORE DELETE ON queueapp_forwardedmessage FOR EACH STATEMENT EXECUTE FUNCTION fail()"
    )
    keep()
    forward()
    ForwardedMessage.objects.using(WAREHOUSE).update(arrived_at=Now() - HOUR)
    keep()

    with pytest.raises(delayed.DispatchFailed):
        mover.dispatch_once()

    assert mover.dispatched == 1


def test_a_sweep_that_works_is_no_recovery_from_a_refusal_of_its_round(two: TwoDatabases, mover: Forwarder) -> None:
    failing(two, "testapp_transactional", "23514")
    keep()

    mover.dispatch_once()

    assert mover.dispatch_breaker.failures == 1


def test_who_does_not_lead_sweeps_nothing(mover: Forwarder) -> None:
    keep()
    mover.dispatch_once()
    ForwardedMessage.objects.using(WAREHOUSE).update(arrived_at=Now() - HOUR)
    mover.elector.resign()
    assert Forwarder("default", WAREHOUSE, uuid.uuid4()).elector.try_lead()
    mover.sweep_at = 0.0

    mover.dispatch_once()

    assert ForwardedMessage.objects.using(WAREHOUSE).exists()


def test_a_target_in_which_the_router_makes_no_tables_lacks_none(two: TwoDatabases) -> None:
    two.there.execute("ALTER TABLE queueapp_forwardedmessage RENAME TO none_of_ours")

    with override_settings(DATABASE_ROUTERS=[NoArrivals()]):
        found = checks.run_checks(databases=[WAREHOUSE])
    # W101 is said of a queue of the tests.
    assert {row.id for row in found if row.id.startswith("queueapp.")} - {"queueapp.W101"} == {"queueapp.W008"}

    found = checks.run_checks(databases=[WAREHOUSE])
    assert {row.id for row in found if row.id.startswith("queueapp.")} - {"queueapp.W101"} == {"queueapp.W006"}


def test_a_receiver_of_poisoned_that_leaves_does_not_end_the_forwarder(two: TwoDatabases, mover: Forwarder) -> None:
    failing(two, "testapp_transactional", "23514", "NEW.correlationid = 'refused'")
    ended: list[Any] = []

    def leave(**_: Any) -> None:
        raise SystemExit

    signals.poisoned.connect(leave)
    keep(correlation_id="refused")
    keep()
    mover.start(ended.append)
    try:
        eventually(lambda: len(there()) == 1 and PoisonMessage.objects.exists())
        mover.dispatch_breaker.success()
        keep()
        mover.wake()
        eventually(lambda: ended or len(there()) == 2)
    finally:
        signals.poisoned.disconnect(leave)
        assert mover.stop(DEADLINE)

    assert not ended


def test_both_directions_at_once(two: TwoDatabases, mover: Forwarder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Leased.delivery, "delayed_in", (WAREHOUSE,))
    for _ in range(30):
        keep()
        Leased.send({}, delay=NOW, delayed_in=WAREHOUSE)
    movers = [mover, Forwarder(WAREHOUSE, "default", uuid.uuid4())]

    with override_settings(QUEUEAPP={"DISPATCH_BATCH": 7}):
        for item in movers:
            item.start()
        eventually(lambda: len(there()) == Leased.objects.count() == 30)
        assert stop_all(movers, DEADLINE)

    assert ForwardedMessage.objects.count() == ForwardedMessage.objects.using(WAREHOUSE).count() == 30


def test_cancel_of_a_message_being_forwarded_waits_and_returns_that_it_is_gone(two: TwoDatabases) -> None:
    identity = keep()
    threads: list[threading.Thread] = []
    cancelled: list[int] = []

    def cancel() -> None:
        cancelled.append(delayed.cancel(identity))
        connections.close_all()

    @contextmanager
    def waiting(_: Any) -> Iterator[None]:
        if connection.in_atomic_block:  # the message is locked
            threads.append(threading.Thread(target=cancel))
            threads[-1].start()
            eventually(lambda: two.here.backends("wait_event_type = 'Lock'"))
        yield

    assert forward(waiting=waiting) == (1, 0, 0)

    threads[0].join(DEADLINE)
    assert cancelled == [0]
    assert len(there()) == 1


@pytest.mark.skipif(connection.vendor != "postgresql", reason="SQL Server has no time that Python has not")
@pytest.mark.parametrize("column", ["expires", "enqueued_at", "stored_at"])
@pytest.mark.parametrize("time", ["infinity", "-infinity", "11999-01-01"])
def test_a_time_that_python_has_not_keeps_nothing_waiting(column: str, time: str) -> None:
    strange = keep()
    with connection.cursor() as cursor:
        cursor.execute(f"UPDATE queueapp_delayedmessage SET {column} = %s", [time])
    second = keep()

    assert forward() == (2, 0, 0)

    arrived = {row.id: row for row in there()}
    assert arrived.keys() == {strange, second}
    if column == "expires":
        expires = arrived[strange].expires
        assert (expires and expires.year) == (2 if time == "-infinity" else None)
