"""Forwarding from one database to another, step by step in this process: what is accepted, moved, refused, and known
again."""

from __future__ import annotations

import threading
import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import IntegrityError, connections, transaction
from django.test import override_settings

from queueapp import InvalidMessage, delayed
from queueapp.failures import poison_operations
from queueapp.models import DelayedMessage, ForwardedMessage, Now, PoisonMessage
from queueapp.operations import statistics
from queueapp.sql.message_columns import COUNTS, MESSAGE_COLUMNS
from tests import column_values
from tests.crash.rig.two_databases import TwoDatabases
from tests.crash.workload.routes import WAREHOUSE
from tests.in_process_worker import DEADLINE
from tests.queueapp.delayed.forwarded import ADDRESS, HOUR, NOW, forward, keep, old_notes, there
from tests.testapp.models import Leased, Transactional

pytestmark = pytest.mark.usefixtures("two")


# -- sending -----------------------------------------------------------------------------------------------------------


def test_it_is_kept_in_the_callers_transaction_of_the_other_database() -> None:
    with transaction.atomic():
        keep()
        transaction.set_rollback(True)
    assert not DelayedMessage.objects.exists()

    with transaction.atomic():
        identity = keep(delay=HOUR)

    row = DelayedMessage.objects.get()
    assert (row.message_id, row.destination) == (identity, ADDRESS)
    assert not DelayedMessage.objects.using(WAREHOUSE).exists()


def test_isolated_it_is_committed_whatever_becomes_of_the_transaction() -> None:
    with transaction.atomic():
        keep(isolated=True)
        transaction.set_rollback(True)

    assert DelayedMessage.objects.get().destination == ADDRESS


def test_kept_in_the_queues_own_database_it_is_delayed_as_ever() -> None:
    Transactional.send({}, delay=HOUR, delayed_in=WAREHOUSE)

    assert DelayedMessage.objects.using(WAREHOUSE).get().destination == "testapp.Transactional"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "goes with delay or at"),
        ({"delay": HOUR, "using": WAREHOUSE}, "using and delayed_in exclude each other"),
        ({"delay": HOUR, "at": HOUR}, "delay and at exclude each other"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidMessage, match=words):
        Transactional.send({}, delayed_in="default", **options)


def test_a_database_that_the_queue_does_not_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Transactional.delivery, "delayed_in", ())
    with pytest.raises(InvalidMessage, match=r"Delivery.delayed_in = \(\) does not name that database"):
        keep()


def test_sending_needs_nothing_of_the_queues_database(two: TwoDatabases) -> None:
    connections[WAREHOUSE].close()
    two.here.server.execute(f"ALTER DATABASE {two.there.name} ALLOW_CONNECTIONS false")

    keep(recipient="a.consumer")

    assert connections[WAREHOUSE].connection is None
    two.here.server.execute(f"ALTER DATABASE {two.there.name} ALLOW_CONNECTIONS true")


# -- forwarding --------------------------------------------------------------------------------------------------------


def test_a_message_arrives_whole() -> None:
    identity = uuid.uuid4()
    DelayedMessage.objects.create(
        message_id=identity, destination=ADDRESS, due=Now(), headers='{"k":"é"}', body=b"\0\xff",
        **column_values.counts(), **column_values.columns(),
    )  # fmt: skip

    assert forward() == (1, 0, 0)

    (row,) = there()
    assert (row.id, row.headers, row.body) == (identity, '{"k":"é"}', b"\0\xff")
    said = column_values.counts() | column_values.columns() | {"priority": 2}
    for name in (*COUNTS, *(column.name for column in MESSAGE_COLUMNS)):
        assert getattr(row, name) == said[name], name
    assert not DelayedMessage.objects.exists()


def test_what_is_not_due_and_what_is_for_others_stays() -> None:
    keep(delay=HOUR)
    Leased.send({}, delay=NOW)

    assert forward() == (0, 0, 0)
    assert delayed.dispatch_due("default", 500) == (1, 0, 0)

    assert [row.destination for row in DelayedMessage.objects.all()] == [ADDRESS]
    remaining = delayed.next_forward_in("default", WAREHOUSE)
    assert remaining is not None
    assert timedelta(minutes=59) < remaining <= HOUR


def test_the_ordinary_dispatcher_leaves_it_alone_however_long_it_is_overdue() -> None:
    """So does that of a version which knows nothing of forwarding."""
    keep()
    DelayedMessage.objects.update(due=Now() - HOUR)

    assert delayed.dispatch_due("default", 500) == (0, 0, 0)
    assert delayed.next_due_in("default") is None
    assert delayed.undeliverable("default") == {}, "this process forwards it"


def test_messages_come_in_due_order_in_pieces_of_some_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    really = delayed.forward.Forwarding.deliver

    def deliver(self: Any, rows: list[Any]) -> None:
        sizes.append(len(rows))
        really(self, rows)

    monkeypatch.setattr(delayed.forward.Forwarding, "deliver", deliver)
    with override_settings(QUEUEAPP={"MAX_BATCH_BYTES": 64 * 1024}):
        ids = [keep(b"x" * 30_000) for _ in range(5)]
        assert forward() == (5, 0, 0)

    assert sizes == [2, 2, 1]
    assert [row.id for row in there()] == ids


def test_two_messages_of_one_id_are_two_messages() -> None:
    identity = uuid.uuid4()
    keep(message_id=identity)
    keep(message_id=identity)

    assert forward() == (2, 0, 0)

    assert [row.id for row in there()] == [identity, identity]


def test_several_forwarders_at_once_deliver_each_message_once() -> None:
    ids = {keep() for _ in range(400)}
    moved: list[int] = []

    def work() -> None:
        while found := delayed.forward_due("default", WAREHOUSE, 20).moved:
            moved.append(found)
        connections.close_all()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)

    while forward().moved:  # the last ones may have been locked by each other
        pass
    assert sum(moved) <= 400
    assert len(there()) == 400
    assert {row.id for row in there()} == ids


# -- what has arrived --------------------------------------------------------------------------------------------------


def arrived_but_not_removed() -> DelayedMessage:
    """As a process leaves it that dies between the commits."""
    keep()
    row = DelayedMessage.objects.get()
    forward()
    row.save(force_insert=True)
    return row


def test_what_has_arrived_is_removed_and_not_delivered_again_also_when_it_was_handled_meanwhile() -> None:
    arrived_but_not_removed()
    Transactional.objects.all().delete()  # handled

    assert forward() == (1, 0, 0)

    assert there() == []
    assert not DelayedMessage.objects.exists()


def test_a_note_is_kept_until_its_message_has_left_the_store() -> None:
    row = arrived_but_not_removed()
    keep()
    forward_only_the_other = delayed.forward_due
    DelayedMessage.objects.filter(pk=row.pk).update(due=Now() + HOUR)
    assert forward_only_the_other("default", WAREHOUSE, 1) == (1, 0, 0)
    assert delayed.forget_arrivals("default", WAREHOUSE) == 0, "too young"
    old_notes()

    assert delayed.forget_arrivals("default", WAREHOUSE) == 1

    DelayedMessage.objects.update(due=Now())
    assert forward() == (1, 0, 0)
    assert len(there()) == 2, "the rescheduled one was known by its note"
    old_notes()
    assert delayed.forget_arrivals("default", WAREHOUSE) == 1
    assert not ForwardedMessage.objects.using(WAREHOUSE).exists()


def test_notes_of_other_databases_are_none_of_its_business() -> None:
    ForwardedMessage.objects.using(WAREHOUSE).create(
        id=uuid.uuid4(), message_id=uuid.uuid4(), origin="another", arrived_at="2000-01-01T00:00Z"
    )

    assert delayed.forget_arrivals("default", WAREHOUSE) == 0


def test_a_queue_that_uses_none_of_it_leaves_no_note() -> None:
    Leased.send({})
    Leased.send({}, delay=NOW)
    Transactional.send({}, delay=NOW)
    delayed.dispatch_due("default", 10)
    delayed.dispatch_due(WAREHOUSE, 10)

    assert Leased.objects.count() == 2
    assert len(there()) == 1
    assert not ForwardedMessage.objects.exists()
    assert not ForwardedMessage.objects.using(WAREHOUSE).exists()


# -- refused -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def refusing(two: TwoDatabases) -> None:
    two.there.execute(
        "ALTER TABLE testapp_transactional ADD CONSTRAINT refusing CHECK (correlationid IS DISTINCT FROM 'refused')"
    )


@pytest.mark.usefixtures("refusing")
def test_one_that_its_queue_refuses_is_poison_here_and_the_others_arrive(two: TwoDatabases) -> None:
    base_exceptions: list[BaseException] = []
    keep()
    refused = keep(correlation_id="refused")
    keep()

    assert forward(on_refused=base_exceptions.append) == (2, 1, 0)

    assert [type(notification) for notification in base_exceptions] == [IntegrityError]
    lost = PoisonMessage.objects.get()
    assert (lost.message_id, lost.destination, lost.reason) == (
        refused,
        ADDRESS,
        f"could not be forwarded to {ADDRESS}",
    )
    assert lost.attempts == 1
    (figures,) = statistics.queue_stats([Transactional])
    assert (figures.poison, figures.delayed, figures.error) == (1, 0, "")
    assert [stats.queue for stats in statistics.queue_stats() if "no such queue" in stats.note] == []

    two.there.execute("ALTER TABLE testapp_transactional DROP CONSTRAINT refusing")
    assert poison_operations.requeue(PoisonMessage.objects.all()) == 1
    assert not PoisonMessage.objects.exists()
    assert forward() == (1, 0, 0)
    assert refused in {row.id for row in there()}


@pytest.mark.usefixtures("refusing")
def test_it_is_tried_as_often_as_the_setting_states() -> None:
    keep(correlation_id="refused")
    with override_settings(QUEUEAPP={"NUMBER_OF_RETRIES": 2}):
        assert [forward() for _ in range(3)] == [(0, 0, 1), (0, 0, 1), (0, 1, 0)]

    assert PoisonMessage.objects.get().attempts == 3


@pytest.mark.usefixtures("refusing")
def test_an_edited_copy_is_forwarded_as_well() -> None:
    keep(correlation_id="refused")
    forward()
    lost = PoisonMessage.objects.get()

    with pytest.raises(LookupError), override_settings(DATABASE_ROUTERS=[]):
        poison_operations.edit_and_requeue(lost.pk, body=b"{}")
    new = poison_operations.edit_and_requeue(lost.pk, body=b"{}")

    assert DelayedMessage.objects.get().message_id == new


def test_a_table_that_is_not_there_yet_is_no_fault_of_the_message(two: TwoDatabases) -> None:
    two.there.execute("ALTER TABLE testapp_transactional RENAME TO later")
    keep()

    with pytest.raises(delayed.DispatchFailed, match="testapp_transactional"):
        forward()

    assert DelayedMessage.objects.get().retries == 0
    two.there.execute("ALTER TABLE later RENAME TO testapp_transactional")
    assert forward() == (1, 0, 0)


def test_a_table_of_arrivals_that_is_not_there_yet_is_none_either(two: TwoDatabases) -> None:
    two.there.execute("ALTER TABLE queueapp_forwardedmessage RENAME TO later")
    keep()

    with pytest.raises(delayed.DispatchFailed, match="queueapp_forwardedmessage"):
        forward()

    assert there() == []
    assert DelayedMessage.objects.get().retries == 0


@pytest.mark.parametrize("zone", ["America/New_York", "Asia/Kolkata"])
def test_a_message_with_half_an_hour_to_live_arrives_where_use_tz_is_false(zone: str, settings: Any) -> None:
    settings.USE_TZ, settings.TIME_ZONE = False, zone
    connections.close_all()
    try:
        keep(expires_in=HOUR / 2)
        assert forward() == (1, 0, 0)

        (row,) = there()
        assert abs(row.expires - datetime.now(UTC) - HOUR / 2) < timedelta(minutes=2)
    finally:
        connections.close_all()
