"""The ledger: each way in and each end is counted, and what comes or goes beside queueapp is found by the check."""

from __future__ import annotations

import ast
import logging
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connections, transaction

import queueapp
from queueapp import Chain, Context, Group, InvalidOption, PublishTo, QueueError, consumer, messages, signals
from queueapp.alerts import conditions, store
from queueapp.delayed import Delayed, SqlDelayedStore, dispatch_due
from queueapp.delayed import operations as delayed
from queueapp.failures import poison_operations, recoverability
from queueapp.flow.ledger import COUNTED, CountedVerbs
from queueapp.models import DelayedMessage, LedgerCheck, LedgerEntry, Now, PoisonMessage
from queueapp.operations import control, expiration, ledger
from queueapp.operations.bulk_operations import delete as delete_in_bulk
from queueapp.operations.move_messages import move_delayed, move_type
from queueapp.operations.selections import Source
from queueapp.operations.statistics import queue_stats
from queueapp.services.leader_election import Elector
from queueapp.services.maintenance import Maintenance
from queueapp.sql import backend_of, queue_sql
from tests.databases import parametrize_alias
from tests.in_process_worker import Worker, eventually, real_commits
from tests.protocol_trace import statements
from tests.testapp.messages import Ping
from tests.testapp.models import (
    Effect,
    Leased,
    Ledgered,
    LedgeredOnce,
    LedgeredTogether,
    LedgeredTransactional,
    LedgeredWholly,
)

pytestmark = real_commits

QUEUES = (Ledgered, LedgeredTransactional, LedgeredTogether, LedgeredOnce)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One case per database."""
    parametrize_alias(metafunc, real_commits.kwargs["available_apps"])


def totals(queue: Any, alias: str) -> dict[str, int]:
    """What the ledger counts, without zeros; it closes."""
    found = ledger.balance(queue, using=alias)
    assert found.closes, found
    there = found.acked + found.expired + found.removed + found.waiting + found.delayed + found.poison
    assert found.opening + found.sent == there, found
    names = ("sent", "acked", "expired", "removed", "waiting", "delayed", "poison")
    return {name: getattr(found, name) for name in names if getattr(found, name)}


def type_label(queue: Any, alias: str) -> str:
    return messages.type_label(queue.objects.using(alias).first().headers)


def seqs_of(queue: Any, alias: str) -> list[int]:
    return list(queue.objects.using(alias).order_by("seq").values_list("seq", flat=True))


# -- ways in -----------------------------------------------------------------------------------------------------------


def send_from(alias: str) -> None:
    Effect.objects.using(alias).bulk_create([Effect(name="a"), Effect(name="b")])
    Ledgered.send_from(Effect.objects.using(alias).values("name"), using=alias)


def move_in(alias: str) -> None:
    for name in "ab":
        Leased.send(Ping(name), using=alias)
    assert move_type(Leased, type_label(Leased, alias), Ledgered, using=alias) == 2


def move_delayed_in(alias: str) -> None:
    for name in "ab":
        Leased.send(Ping(name), delay=timedelta(hours=1), using=alias)
    move_delayed("testapp.Leased", Ledgered, using=alias)


def requeue_to(alias: str) -> None:
    for name in "ab":
        Leased.send(Ping(name), using=alias)
    control.move_to_poison(Leased, seqs_of(Leased, alias), reason="r", using=alias)
    assert poison_operations.requeue(PoisonMessage.objects.using(alias), to=Ledgered) == 2


WAYS_IN: dict[str, tuple[Callable[[str], Any], dict[str, int]]] = {
    "send": (lambda alias: [Ledgered.send({"n": n}, using=alias) for n in range(2)], {"sent": 2, "waiting": 2}),
    "send_many": (
        lambda alias: Ledgered.send_many(({"n": n} for n in range(2)), using=alias),
        {"sent": 2, "waiting": 2},
    ),
    "send_from": (send_from, {"sent": 2, "waiting": 2}),
    "delayed": (
        lambda alias: [Ledgered.send({}, delay=timedelta(hours=1), using=alias) for _ in range(2)],
        {"sent": 2, "delayed": 2},
    ),
    "movemessages": (move_in, {"sent": 2, "waiting": 2}),
    "movedelayed": (move_delayed_in, {"removed": -2, "delayed": 2}),
    "requeued from another queue": (requeue_to, {"removed": -2, "waiting": 2}),
}


@pytest.mark.parametrize("way", WAYS_IN)
def test_way_in_is_counted(alias: str, way: str) -> None:
    run, expected = WAYS_IN[way]

    run(alias)

    assert totals(Ledgered, alias) == expected


def test_what_is_rolled_back_is_not_counted(alias: str) -> None:
    with transaction.atomic(using=alias):
        Ledgered.send({}, using=alias)
        Ledgered.send({}, delay=timedelta(hours=1), using=alias)
        transaction.set_rollback(True, using=alias)

    assert totals(Ledgered, alias) == {}
    assert not LedgerEntry.objects.using(alias).exists()


# -- ends --------------------------------------------------------------------------------------------------------------


def receive_and(how: str, **options: Any) -> Callable[[str], Any]:
    def run(alias: str) -> None:
        with Ledgered.receive(using=alias) as batch:
            for message in batch:
                getattr(message, how)(**options)

    return run


def end_by_seq(verb: str) -> Callable[[str], Any]:
    def run(alias: str) -> None:
        with Ledgered.receive(using=alias):
            row = Ledgered.objects.using(alias).get()
            assert getattr(Ledgered, verb)(row.seq, client=row.lease_token, using=alias) == 1

    return run


def to_poison(alias: str) -> None:
    control.move_to_poison(Ledgered, seqs_of(Ledgered, alias), reason="r", using=alias)


def delete_poison(alias: str) -> None:
    to_poison(alias)
    rows = PoisonMessage.objects.using(alias)
    source = Source(PoisonMessage, alias)
    assert delete_in_bulk(source, list(rows.values_list("pk", flat=True)), {}, "ann").changed == 1


def drop_archived(alias: str) -> None:
    to_poison(alias)
    poison_operations.archive(PoisonMessage.objects.using(alias))
    PoisonMessage.objects.using(alias).update(archived_at=Now() - timedelta(days=2))
    assert poison_operations.drop_old(timedelta(days=1), using=alias) == 1


def requeue(alias: str) -> None:
    to_poison(alias)
    assert poison_operations.requeue(PoisonMessage.objects.using(alias)) == 1


def edit(alias: str) -> None:
    to_poison(alias)
    poison_operations.edit_and_requeue(PoisonMessage.objects.using(alias).get().number, body=b"{}", using=alias)


def expire_in_table(alias: str) -> None:
    Ledgered.objects.using(alias).update(expires=Now() - timedelta(seconds=1))
    assert expiration.delete_expired(Ledgered, alias, 10) == 1


ENDS: dict[str, tuple[Callable[[str], Any], dict[str, int]]] = {
    "acked": (receive_and("ack"), {"acked": 1}),
    "returned": (receive_and("cancel"), {"waiting": 1}),
    "expired by its receiver": (receive_and("expire"), {"expired": 1}),
    "acked by seq": (end_by_seq("ack"), {"acked": 1}),
    "expired by seq": (end_by_seq("expire"), {"expired": 1}),
    "expired": (expire_in_table, {"expired": 1}),
    "purged": (lambda alias: control.purge(Ledgered, using=alias), {"removed": 1}),
    "deleted": (lambda alias: control.delete(Ledgered, seqs_of(Ledgered, alias), using=alias), {"removed": 1}),
    "moved away": (
        lambda alias: move_type(Ledgered, type_label(Ledgered, alias), Leased, using=alias),
        {"removed": 1},
    ),
    "moved to poison": (to_poison, {"poison": 1}),
    "deleted from poison": (delete_poison, {"removed": 1}),
    "dropped after its retention": (drop_archived, {"removed": 1}),
    "requeued": (requeue, {"waiting": 1}),
    "edited": (edit, {"sent": 2, "waiting": 1, "poison": 1}),
}


@pytest.mark.parametrize("end", ENDS)
def test_end_is_counted(alias: str, end: str) -> None:
    run, expected = ENDS[end]
    Ledgered.send(Ping("a"), using=alias)

    run(alias)

    assert totals(Ledgered, alias) == {"sent": 1} | expected


def test_what_expires_and_cannot_be_published_is_poison_and_not_expired(alias: str, delivery: Any) -> None:
    delivery(Ledgered, on_expired=PublishTo("no queue collects this"))
    Ledgered.send(Ping("a"), using=alias)

    receive_and("expire")(alias)

    assert totals(Ledgered, alias) == {"sent": 1, "poison": 1}


def test_delayed_message_is_counted_on_its_way(alias: str) -> None:
    first, second, third = (Ledgered.send({}, delay=timedelta(hours=1), using=alias) for _ in range(3))
    assert delayed.cancel(first, using=alias) == 1
    assert totals(Ledgered, alias) == {"sent": 3, "removed": 1, "delayed": 2}

    DelayedMessage.objects.using(alias).filter(message_id=second).update(due=Now())
    assert dispatch_due(alias, 10).moved == 1
    assert totals(Ledgered, alias) == {"sent": 3, "removed": 1, "delayed": 1, "waiting": 1}

    move_delayed("testapp.Ledgered", Leased, using=alias)
    assert totals(Ledgered, alias) == {"sent": 3, "removed": 2, "waiting": 1}
    assert third


def test_the_delayed_store_counts_what_is_stored_and_removed_by_its_methods(alias: str) -> None:
    delayed_store = SqlDelayedStore(alias)
    due = datetime.now(UTC) - timedelta(seconds=1)
    for _ in range(2):
        delayed_store.store(Delayed(uuid.uuid4(), "testapp.Ledgered", due, "{}", b"{}"))
    assert totals(Ledgered, alias) == {"sent": 2, "delayed": 2}

    with transaction.atomic(using=alias):
        found = delayed_store.fetch_next_due(datetime.now(UTC))
        assert found is not None
        assert delayed_store.remove(found)
    assert totals(Ledgered, alias) == {"sent": 2, "removed": 1, "delayed": 1}


# -- workers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("queue", QUEUES, ids=lambda queue: queue.__name__)
def test_worker_leaves_a_ledger_that_closes(
    alias: str, queue: Any, no_consumers: None, start_worker: Callable[..., Worker], settings: Any
) -> None:
    """Messages that are handled, that fail once, are retried later, are discarded, and that fail for good."""
    settings.QUEUEAPP = {"PEEK_DELAY": 0.1, "RETRY_DELAY": 0}
    verdicts = {
        "later": recoverability.RetryLater(timedelta(hours=1)),
        "discarded": recoverability.Discard("d"),
        "poison": recoverability.Poison("p"),
    }

    def act(message: Ping, context: Context) -> None:
        if message.name in verdicts or context.attempt <= message.fail:
            raise ValueError(message.name)

    def policy(failure: Any) -> Any:
        return verdicts.get(str(failure.exception), recoverability.RetryNow())

    consumer(queue, name="ledger.act", attempts=3, policy=policy)(act)
    queue.send_many([Ping(f"plain {n}") for n in range(30)], using=alias)
    for name in verdicts:
        queue.send(Ping(name), using=alias)
    queue.send(Ping("again", fail=1), using=alias)

    start_worker(queue, alias=alias)

    once = queue is LedgeredOnce
    expected = {"sent": 34, "removed": 1, "acked": 30 if once else 31, "poison": 3 if once else 1}
    expected |= {} if once else {"delayed": 1}
    eventually(lambda: not queue.objects.using(alias).exists() and found(queue, alias) == expected)
    assert totals(queue, alias) == expected


def found(queue: Any, alias: str) -> dict[str, int]:
    """``totals`` while a worker works; {} where it is between two transactions of AT_MOST_ONCE."""
    return totals(queue, alias)


def test_groups_and_follow_ups_are_counted(alias: str) -> None:
    """What an ack sends comes in with it."""
    with Group(on_complete=LedgeredWholly.prepare({"whole": 1}, using=alias), using=alias) as group:
        group.send(LedgeredWholly, {"n": 1})
    Chain([LedgeredWholly.prepare({"n": n}, using=alias) for n in range(3)]).send()

    acked = 0
    while acked < 5:
        with LedgeredWholly.receive(10, using=alias) as batch:
            for message in batch:
                message.ack()
                acked += 1

    assert totals(LedgeredWholly, alias) == {"sent": 5, "acked": 5}


# -- the check ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def notifications() -> Iterator[list[Any]]:
    heard: list[Any] = []

    def hear(alert: Any, **_: Any) -> None:
        heard.append(alert)

    signals.alerted.connect(hear)
    yield heard
    signals.alerted.disconnect(hear)


def evaluate(alias: str) -> None:
    labels = {"testapp.Ledgered"}
    store.reconcile(alias, conditions.evaluate(alias, [Ledgered]), labels)
    store.send_notifications(alias, labels)


def test_a_row_that_is_deleted_by_hand_is_an_alert_until_it_is_accepted(
    alias: str, settings: Any, notifications: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    settings.QUEUEAPP = {"ALERTS": {"max_waiting": 1000}}
    Ledgered.send_many(({"n": n} for n in range(3)), using=alias)
    Ledgered.objects.using(alias).create(id=uuid.uuid4())  # before the ledger opens
    assert ledger.check(Ledgered, alias).difference == 0
    evaluate(alias)
    assert notifications == []

    Ledgered.objects.using(alias).order_by("seq").first().delete()
    PoisonMessage.objects.using(alias).create(queue="testapp.Ledgered", message_id=uuid.uuid4(), reason="by hand")
    row = ledger.check(Ledgered, alias)
    assert (row.in_queue, row.in_delayed, row.in_poison) == (-1, 0, 1)
    evaluate(alias)
    evaluate(alias)

    (notice,) = [notice for notice in notifications if notice.kind == "ledger"]
    assert notice.text.startswith(
        "testapp.Ledgered: the ledger does not close: 1 fewer in the queue than counted, 1 more in poison than counted,"
    )
    assert notice.text.endswith("UTC; find out why, then run manage.py ledger testapp.Ledgered --accept NOTE")
    (stats,) = queue_stats([Ledgered])
    assert stats.ledger_difference == 2

    with pytest.raises(InvalidOption, match="note"):
        ledger.accept(Ledgered, " ", using=alias)
    before = ledger.accept(Ledgered, "the restore of 12:00", using=alias)
    assert (before.closes, before.differences) == (False, (-1, 0, 1))
    assert "the restore of 12:00" in caplog.text
    evaluate(alias)
    assert [notice.resolved for notice in notifications if notice.kind == "ledger"] == [False, True]
    assert ledger.balance(Ledgered, using=alias).closes


def test_a_ledger_is_not_opened_where_tables_are_not_read_as_of_one_moment(alias: str, monkeypatch: Any) -> None:
    """SQL Server without READ_COMMITTED_SNAPSHOT: the opening balance would be wrong ever after."""
    Ledgered.objects.using(alias).create(id=uuid.uuid4())
    with monkeypatch.context() as patched:
        patched.setattr(type(backend_of(connections[alias]).ledger), "reads_together", lambda *_: False)
        row = ledger.check(Ledgered, alias)
        assert (row.opened_at, row.closed_at) == (None, None)
        assert "READ_COMMITTED_SNAPSHOT is off" in row.error
        with pytest.raises(QueueError, match=r"testapp\.Ledgered: the ledger cannot be checked: READ_COMMITTED"):
            ledger.check_now(Ledgered, using=alias)
        with pytest.raises(QueueError, match="cannot be opened: READ_COMMITTED_SNAPSHOT is off"):
            ledger.accept(Ledgered, "why", using=alias)
    Ledgered.objects.using(alias).all().delete()

    row = ledger.check(Ledgered, alias)
    assert (row.error, row.difference) == ("", 0)


def test_the_command_shows_the_balance_and_fails_where_it_does_not_close(alias: str, monkeypatch: Any) -> None:
    monkeypatch.setattr("django.db.router.db_for_write", lambda model, **_: alias)
    Ledgered.send_many(({"n": n} for n in range(3)), using=alias)
    receive_and("ack")(alias)

    assert command("testapp.Ledgered") == (
        "testapp.Ledgered: 0 at the opening + 3 sent = 1 acked + 0 expired + 0 removed + 2 waiting + 0 delayed "
        "+ 0 poison: closes\n"
    )
    assert "sent 3, acked 1, expired 0, removed 0" in command("testapp.Ledgered", "--minutes", "5")
    Ledgered.objects.using(alias).order_by("seq").first().delete()
    with pytest.raises(CommandError, match="1 ledger of 1 did not close"):
        command("testapp.Ledgered", "--json")
    with pytest.raises(CommandError, match="one queue"):
        command("--accept", "why")
    assert ": closes" in command("testapp.Ledgered", "--accept", "a test")
    with pytest.raises(CommandError, match=r"ledger = True"):
        command("testapp.Leased")


def command(*arguments: str) -> str:
    out = StringIO()
    call_command("ledger", *arguments, stdout=out)
    return out.getvalue()


def test_maintenance_checks_and_adds_up(alias: str) -> None:
    for _ in range(5):
        Ledgered.send({}, using=alias)
    receive_and("ack")(alias)
    rows = LedgerEntry.objects.using(alias)
    rows.update(minute=Now() - timedelta(minutes=3))
    Maintenance(alias, [Ledgered, Leased], Elector(alias, "tests", uuid.uuid4()))._check_ledgers()

    assert sorted(rows.filter(level=1).exclude(kind="opening").values_list("kind", "messages")) == [
        ("acked", -1), ("sent", 5),
    ]  # fmt: skip
    assert not rows.filter(level=0).exists()
    assert LedgerCheck.objects.using(alias).get().closed_at is not None
    rows.update(minute=Now() - timedelta(days=8))
    ledger.add_up(alias)
    assert not rows.filter(level__lt=2).exists()
    assert totals(Ledgered, alias) == {"sent": 5, "acked": 1, "waiting": 4}


def test_a_day_is_one_of_utc_whatever_the_zone_of_the_session(alias: str, settings: Any) -> None:
    settings.USE_TZ, settings.TIME_ZONE = False, "Asia/Kolkata"
    connections.close_all()
    Ledgered.send({}, using=alias)
    rows = LedgerEntry.objects.using(alias)
    rows.update(minute=datetime(2026, 1, 1, 20, 15, tzinfo=UTC))
    ledger.add_up(alias)
    assert list(rows.values_list("minute", "level")) == [(datetime(2026, 1, 1, tzinfo=UTC), 2)]
    connections.close_all()


# -- without a ledger --------------------------------------------------------------------------------------------------


def test_a_queue_without_a_ledger_has_the_statements_that_it_had(alias: str) -> None:
    sql = queue_sql(Leased, connections[alias])
    assert not any(isinstance(getattr(sql, subject), CountedVerbs) for subject in COUNTED)
    with statements() as said:
        Leased.send(Ping("a"), using=alias)
        Leased.send(Ping("a"), delay=timedelta(hours=1), using=alias)
        with Leased.receive(using=alias) as batch:
            for message in batch:
                message.ack()
    assert not [text for text in said if "ledger" in str(text)]
    control.purge(Leased, using=alias)
    delayed.cancel(DelayedMessage.objects.using(alias).get().message_id, using=alias)
    assert not LedgerEntry.objects.using(alias).exists()


@pytest.mark.parametrize("vendor", ["postgresql", "sqlserver"])
def test_every_verb_that_inserts_or_deletes_messages_is_counted(vendor: str) -> None:
    """By the text of the statements: a new verb must join ``COUNTED``."""
    counted = {verb for verbs in COUNTED.values() for verb in verbs}
    # What the verbs call.
    parts = {"_insert_into", "_build_claims", "_purge_expired"}
    missing = set()
    for path in (Path(queueapp.__file__).parent / "sql" / vendor).glob("*.py"):
        source = path.read_text()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                text = ast.get_source_segment(source, node) or ""
                if "DELETE FROM {self._q}" in text or "INSERT INTO {self._q}" in text or "DELETE q " in text:
                    missing.add(node.name)
    assert missing - counted - parts == set()


def test_logging_names_the_queue(alias: str, caplog: pytest.LogCaptureFixture) -> None:
    ledger.check(Ledgered, alias)
    Ledgered.objects.using(alias).create(id=uuid.uuid4())
    with caplog.at_level(logging.WARNING):
        ledger.check(Ledgered, alias)
    (record,) = [record for record in caplog.records if getattr(record, "difference", 0)]
    assert (record.queue, record.difference) == ("testapp.Ledgered", 1)
