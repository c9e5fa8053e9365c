"""The GRANTs of docs/privileges.md are enough, and no more than enough, for what each role does."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import kombu
import kombu.pools
import pytest
from celery import Celery
from django.apps import apps
from django.db import Error, connection, transaction
from sqlglot import exp

from queueapp import Group, delayed, notifier, publish, publish_many, replay
from queueapp.contrib.celery import poison as buried
from queueapp.contrib.celery import result_rows, topology
from queueapp.contrib.celery.broker_migration.endpoints import QueueappEndpoint
from queueapp.contrib.celery.in_flight import LeasedMessage
from queueapp.contrib.celery.models import BrokerQueue, CeleryResult, CompletedMove, DeclaredQueue, PendingMove
from queueapp.contrib.tasks import results
from queueapp.contrib.tasks.models import Result, TaskQueue
from queueapp.encryption import keyring, subject_keys
from queueapp.failures import apply_verdict, poison_operations, recoverability
from queueapp.flow.rate_limit import RateLimit
from queueapp.journal import retention
from queueapp.models import (
    ClaimRecord,
    DeferredAck,
    DelayedMessage,
    FairTurn,
    ForwardedMessage,
    GroupAddition,
    GroupMember,
    GroupMessage,
    JournalEntry,
    KeyTokenBucket,
    Leader,
    MessageGroup,
    MessageKey,
    MessageResult,
    Now,
    PoisonMessage,
    ProcessedMessage,
    QueueControl,
    Schedule,
    Subscriber,
    Subscription,
    TokenBucket,
)
from queueapp.models.delivery import Delivery
from queueapp.operations import control, expiration, ledger, move_messages, privileges, schema_check, subscriptions
from queueapp.operations.journal import journal_stats
from queueapp.operations.statistics import queue_stats
from queueapp.receiving import inbox
from queueapp.schedules import declarations, stored
from queueapp.services.leader_election import Elector
from queueapp.services.maintenance import purge_expired
from queueapp.services.orphaned_leases import release_orphaned_leases
from queueapp.sql import ErrorKind, backend_of, queue_sql
from queueapp.sql.claims import SEQ, SeqRange
from queueapp.sql.message_columns import Row
from queueapp.topics import publisher
from queueapp.topics.backfill import QueueFeeder
from tests.queueapp.contrib.tasks.declared import noop
from tests.queueapp.sql.tsql import parsed
from tests.testapp.leases import Deferring
from tests.testapp.messages import Nop, Ping
from tests.testapp.models import (
    Addressed,
    Capped,
    Followed,
    Grouped,
    InTurns,
    Keyed,
    KeyedTransactional,
    Leased,
    LedgeredWholly,
    Rated,
    RatedPerKey,
)

pytestmark = pytest.mark.django_db(transaction=True)
DOCS = (Path(__file__).parents[2] / "docs" / "privileges.md").read_text()
_, POSTGRESQL, SQLSERVER = re.split(r"^## (?:PostgreSQL|SQL Server)$", DOCS, flags=re.MULTILINE)
#: How a user with no rights is made, taken on, laid aside and removed.
USERS = {
    "postgresql": (
        'CREATE ROLE "{}"', 'SET ROLE "{}"', "RESET ROLE", 'DROP OWNED BY "{0}"; DROP ROLE "{0}"',
    ),
    "microsoft": ("CREATE USER [{}] WITHOUT LOGIN", "EXECUTE AS USER = '{}'", "REVERT", "DROP USER [{}]"),
}  # fmt: skip


def grants(role: str) -> list[str]:
    """The documented GRANT statements for a role, for the table of ``Leased``."""
    page = POSTGRESQL if connection.vendor == "postgresql" else SQLSERVER
    text = re.sub(r"--.*", "", page.replace("<queue>", Leased._meta.db_table))
    found = [re.sub(r"\s+", " ", item) for item in re.findall(r"GRANT[^;]+;", text)]
    return [item for item in found if re.search(rf" TO \[?{role}\]?;", item)]


@contextmanager
def published_to(queue: Any, topic: str) -> Iterator[None]:
    """Let a queue collect a topic for a while."""
    before = queue.delivery
    queue.delivery = Delivery(before.given | {"underlying_topic": topic}, "a test's ")
    publisher.forget()
    try:
        yield
    finally:
        queue.delivery = before
        publisher.forget()


@contextmanager
def acting_as(*roles: str) -> Iterator[None]:
    """Run the block with the privileges of a new user that has the documented grants of these roles and nothing
    else."""
    name = f"{roles[-1]}_{uuid.uuid4().hex[:12]}"
    make, become, unbecome, drop = (text.format(name) for text in USERS[connection.vendor])
    quoted = connection.ops.quote_name(name)
    statements = []
    for role in roles:
        found = grants(role)
        assert found, f"docs/privileges.md has no grants for {role} on {connection.display_name}"
        statements += [re.sub(rf" TO \[?{role}\]?;", f" TO {quoted};", item) for item in found]
    if notifier.prepare(connection) is not None:
        # A database that cannot have Service Broker has no procedures to grant.
        statements = [statement for statement in statements if "GRANT EXECUTE" not in statement]
    with connection.cursor() as cursor:
        cursor.execute(make)
        try:
            for statement in statements:
                cursor.execute(statement)
            cursor.execute(become)
            yield
        finally:
            cursor.execute(unbecome)
            for statement in drop.split("; "):
                cursor.execute(statement)


@contextmanager
def refused() -> Iterator[None]:
    """The block is refused, for want of a privilege."""
    with pytest.raises(Error) as raised:
        yield
    assert backend_of(connection).error_kind(raised.value) is ErrorKind.DENIED


@pytest.fixture
def celery_app() -> Iterator[Celery]:
    app = Celery("privileges", broker="queueapp://", backend="queueapp://", set_as_current=False)
    yield app
    kombu.pools.reset()
    app.close()


def test_copies_of_consumers_are_made_shown_and_moved_under_the_documented_grants(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The grants are for the table of ``Leased``: it gets a recipient's index by nothing, which no statement here needs.
    monkeypatch.setattr(Leased._meta, "db_table", Addressed._meta.db_table)
    with acting_as("worker"):
        assert subscriptions.register("default", [Addressed]) == 2
        assert subscriptions.register("default", [Addressed]) == 0
    with acting_as("producer"):
        Addressed.send(Nop(1, ""))
        Addressed.send_many([Nop(2, "")])
        for _ in range(2):
            Addressed.send(Ping("x"))
        assert Subscription.objects.count() == 2
        with refused():
            Subscription.objects.all().delete()
    assert Addressed.objects.filter(recipient="addressed.first").count() == 2
    assert Addressed.objects.filter(recipient="").count() == 2
    seqs = list(Addressed.objects.filter(recipient="").values_list("seq", flat=True))
    with acting_as("worker"), transaction.atomic():
        assert queue_sql(Addressed, connection).fanout.replace_by_copies(connection, seqs, ["one", "two"]) == 2
    with acting_as("inspector"):
        (found,) = queue_stats([Addressed])
        assert [consumer.consumer for consumer in found.consumers] == ["addressed.first", "addressed.second"]
    with acting_as("inspector", "operator"):
        assert subscriptions.move_copies(Addressed, "one", "addressed.first") == 2
        assert subscriptions.purge_copies(Addressed, "two") == 2
        assert subscriptions.unsubscribe(Addressed, "addressed.second") == 1


def claim_one() -> tuple[int, uuid.UUID]:
    token = uuid.uuid4()
    rows = queue_sql(Leased, connection).claims.claim_by_lease(connection, [SeqRange()], 1, token, uuid.uuid4(), 60_000)
    return rows[0][SEQ], token


def test_a_producer_sends_in_every_way_and_cannot_read_or_delete() -> None:
    with acting_as("producer"):
        Leased.send({"n": 1})
        Leased.send({"n": 2}, delay=timedelta(hours=1), expires_in=timedelta(hours=1))
        assert Leased.send_many({"n": n} for n in range(5)) == 5
        with refused():
            list(Leased.objects.all())
        with refused(), Leased.receive(1):
            pass
    assert Leased.objects.count() == 6
    assert DelayedMessage.objects.count() == 1


def test_a_worker_receives_ends_fails_dispatches_and_runs_maintenance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(declarations, "declared", {})
    Leased.send_many({"n": n} for n in range(6))
    Leased.send({"n": 7}, delay=timedelta(0))
    with acting_as("worker"):
        sql = queue_sql(Leased, connection)
        assert sql.claims.peek(connection, [SeqRange()], [], 100).ahead == 6
        seq, token = claim_one()
        assert sql.acks.extend(connection, [seq], token, 1000) == [seq]
        assert sql.acks.ack(connection, [seq], token) == 1
        assert len(sql.claims.claim_by_delete(connection, [SeqRange()], 1)) == 1
        seq, token = claim_one()
        assert sql.acks.release(connection, [seq], token, cancelled=False) == 1
        for attempt in range(5):
            verdict = apply_verdict.fail(Leased, "default", seq, ValueError("no"), consumer=None, token=None)
            assert verdict is not None
            if isinstance(verdict, recoverability.RetryLater):
                assert delayed.make_due(DelayedMessage.objects.all()) >= 1
                assert delayed.dispatch_due("default", 10).moved >= 1
                seq = max(Leased.objects.values_list("seq", flat=True))
            assert attempt < 5
        assert PoisonMessage.objects.count() == 1
        Subscriber.objects.create(
            queue="x", host="h", process=1, supervisor=uuid.uuid4(), alive_until=Now() - timedelta(1)
        )
        row = Subscriber.objects.create(
            queue=Leased._meta.label, host="h", process=2, supervisor=uuid.uuid4(), alive_until=Now() - timedelta(1)
        )
        release_orphaned_leases("default")
        assert not Subscriber.objects.filter(pk=row.pk).exists()
        assert QueueControl.objects.filter(queue=Leased._meta.label, crash_tracking_until__gt=Now()).exists()
        purge_expired(Leased, "default")
        leadership = Elector("default", "test", uuid.uuid4())
        assert leadership.try_lead()
        leadership.resign()
        assert poison_operations.drop_old(timedelta(hours=1)) == 0
        Leased.schedule({}, name="of the worker", every=timedelta(seconds=1), misfire="skip")
        stored.declare("default")
        assert stored.run_due("default") is not None
        monkeypatch.setattr(declarations, "declared", {})
        stored.declare("default")
        assert not Schedule.objects.exists()
        monkeypatch.setattr(Leased, "delivery", Delivery(Leased.delivery.given | {"rate": "60/s"}, "a test's "))
        assert RateLimit(Leased, "default").take(1) == RateLimit(Leased, "default").take(1) == 1
        with refused():
            Leader.objects.all().delete()
    assert Leader.objects.get(role="test").term == 1


def test_an_inspector_reads_figures_and_changes_nothing() -> None:
    Leased.send({"n": 1})
    with acting_as("inspector"):
        (found,) = queue_stats([Leased])
        assert (found.waiting, found.error) == (1, "")
        assert list(PoisonMessage.objects.all()) == []
        with refused():
            Leased.send({"n": 2})
        with refused():
            Leased.objects.update(priority=1)


def test_a_forwarder_puts_in_what_another_database_has_kept() -> None:
    rows = [Row(0, uuid.uuid4(), "{}", b"{}"), Row(0, uuid.uuid4(), "{}", b"{}")]
    with acting_as("forwarder"):
        noted = backend_of(connection).delayed.record_forwarded(
            connection, ForwardedMessage._meta.db_table, [(row.id, row.id) for row in rows], "elsewhere"
        )
        assert noted == {row.id for row in rows}
        assert queue_sql(Leased, connection).inserts.insert_rows(connection, rows) == 2
        assert ForwardedMessage.objects.filter(origin="elsewhere", arrived_at__lt=Now()).delete()[0] == 2
        with refused():
            list(Leased.objects.all())
    assert Leased.objects.count() == 2


def test_a_table_that_a_role_may_not_read_is_not_taken_for_missing() -> None:
    with acting_as("producer"):
        assert schema_check.missing("default", [Leased]) == []


def test_an_operator_pauses_purges_requeues_and_archives() -> None:
    Leased.send({"n": 1})
    PoisonMessage.objects.bulk_create(
        [PoisonMessage(queue=Leased._meta.label, message_id=digit * 32, reason="tests") for digit in "01"]
    )
    Schedule.objects.create(name="by hand", queue="testapp.Leased", every=timedelta(hours=1))
    with acting_as("inspector"), refused():
        Leased.objects.all().delete()
    with acting_as("inspector", "operator"):
        control.pause(Leased)
        assert control.purge(Leased).deleted == 1
        assert poison_operations.requeue(PoisonMessage.objects.filter(message_id="0" * 32)) == 1
        assert poison_operations.archive(poison_operations.find()) == 1
        control.resume(Leased)
        assert stored.pause("default", ["by hand"]) == stored.resume("default", ["by hand"]) == 1
        assert stored.run_now("default", "by hand") is not None
        Leased.objects.filter(headers__contains='"schedule"').delete()
        with refused():
            Subscriber.objects.all().delete()
    assert Leased.objects.count() == 1
    Leased.objects.update(headers='{"type": "tests.Strange"}')
    with acting_as("inspector", "operator"):
        assert move_messages.move_type_to_poison(Leased, "tests.Strange") == 1
    assert not Leased.objects.exists()


def test_an_operator_ends_what_has_a_group_a_result_and_a_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Leased._meta, "db_table", LedgeredWholly._meta.db_table)
    with Group(on_complete=LedgeredWholly.prepare({"all": 1})) as group:
        group.send(LedgeredWholly, {"n": 1})
    LedgeredWholly.send({"n": 2}, keep_result=timedelta(days=1))
    seqs = list(LedgeredWholly.objects.values_list("seq", flat=True))
    with acting_as("inspector", "operator"):
        assert control.move_to_poison(LedgeredWholly, seqs, reason="by hand") == 2
        assert group.is_complete
        assert MessageResult.objects.get().error == "by hand"
        assert poison_operations.requeue(PoisonMessage.objects.all()) == 2
        assert control.purge(LedgeredWholly).deleted == 3
        assert ledger.accept(LedgeredWholly, "a test").closes
    with acting_as("inspector"):
        assert queue_stats([LedgeredWholly])[0].ledger_difference == 0


def test_wake_ups_need_nothing_but_what_is_granted() -> None:
    if connection.vendor != "microsoft":
        pytest.skip("NOTIFY and LISTEN need no privilege")
    if (why := notifier.prepare(connection)) is not None:
        pytest.skip(f"the database has no wake-ups: {why}")
    with acting_as("worker"), connection.cursor() as cursor:
        cursor.execute("EXEC queueapp_listen")
        ((tells, hears),) = cursor.fetchall()
        backend_of(connection).notifications.notify(connection, notifier.CHANNEL, "shop.Orders")
        assert backend_of(connection).notifications.may_notify(connection)
        cursor.execute("EXEC queueapp_hear @hears = %s", [hears])
        assert ("DEFAULT", "shop.Orders") in [tuple(row) for row in cursor.fetchall()]
        cursor.execute("EXEC queueapp_stop_listening @tells = %s, @hears = %s", [tells, hears])
    with acting_as("inspector"):
        backend_of(connection).notifications.notify(connection, notifier.CHANNEL, "shop.Orders")
        assert not backend_of(connection).notifications.may_notify(connection), (
            "who may not tell is not asked to for a while"
        )


def test_the_grants_of_sql_server_are_t_sql() -> None:
    statements = re.findall(r"GRANT[^;]+;", re.sub(r"--.*", "", SQLSERVER).replace("<queue>", "orders"))
    assert len(statements) > 20
    for statement in statements:
        assert [type(statement) for statement in parsed(statement)] == [exp.Grant], statement


def test_each_role_has_the_same_rights_on_both_databases() -> None:
    def rights(page: str) -> set[tuple[str, str, str]]:
        text = re.sub(r"\s+", " ", re.sub(r"--.*|\([^)]*\)", "", page))
        return {
            (role, verb.strip(), table.strip(' []"'))
            for verbs, tables, role in re.findall(r"GRANT ([^;]+?) ON ([^;]+?) TO \[?(\w+)\]?;", text)
            for verb in verbs.split(",")
            for table in tables.split(",")
            if verb != "EXECUTE"  # NOTIFY needs none
        }

    assert rights(POSTGRESQL) == rights(SQLSERVER)


def test_journal_works_under_the_documented_grants(settings: Any) -> None:
    settings.QUEUEAPP = {"JOURNAL": {"^journaled": timedelta(hours=1)}}
    producer, worker, inspector = ("producer", "worker", "inspector")
    before = dict(Leased.delivery.given)
    with published_to(Leased, "journaled.rights"):
        with acting_as(producer):
            publish("journaled.rights", {"n": 1})
            publish_many("journaled.rights", [{"n": 2}, {"n": 3}])
        Leased.objects.all().delete()
        with acting_as(worker):
            assert retention.renumber("default") == 0
            retention.make_partitions("default")
            filler = QueueFeeder(Leased, "default")
            filler.attach()
            assert filler.fill().copied == 0, "it took them when they were published"
            assert [entry.decode()["n"] for entry in replay("journaled.rights", batch=1)] == [1, 2, 3]
            JournalEntry.objects.count()
        JournalEntry.objects.update(published_at=Now() - timedelta(days=3))
        with acting_as(worker):
            assert retention.apply_retention("default") == 3
        with acting_as(inspector):
            assert journal_stats("default").topics == []
    assert Leased.delivery.given == before


def test_a_sender_of_celerys_tasks_declares_publishes_and_waits_and_takes_nothing(celery_app: Celery) -> None:
    with acting_as("task_sender"):
        celery_app.send_task("shop.bill", [1])
        celery_app.send_task("shop.bill", [2], countdown=3600)
        with kombu.Connection("queueapp://") as conn, conn.channel() as channel:
            channel.exchange_declare("news", type="fanout")
            channel.queue_declare("reader")
            channel.queue_bind("reader", "news")
            conn.Producer().publish({"n": 3}, exchange="news", serializer="json")
        celery_app.backend.set_chord_size("a chord", 2)
        assert celery_app.AsyncResult("unknown").status == "PENDING"
        with refused():
            BrokerQueue.objects.all().delete()
        with refused():
            CeleryResult.objects.all().delete()
    assert sorted(BrokerQueue.objects.values_list("recipient", flat=True)) == ["celery", "reader"]
    assert DelayedMessage.objects.get().recipient == "celery"


def test_a_celery_worker_receives_ends_tasks_and_runs_maintenance(celery_app: Celery) -> None:
    for number in range(3):
        celery_app.send_task("shop.bill", [number])
    sql = queue_sql(BrokerQueue, connection)
    with acting_as("worker", "task_worker"):
        token = uuid.uuid4()
        ranges = [SeqRange(recipient="celery", priority=level) for level in range(10)]
        rows = sql.claims.claim_by_lease(connection, ranges, 3, token, uuid.uuid4(), 60_000)
        first, second, third = (row[SEQ] for row in rows)
        assert sql.acks.release(connection, [first], token, cancelled=True) == 1
        assert sql.acks.ack(connection, [second], token) == 1
        with transaction.atomic():
            assert buried.move_to_poison("default", LeasedMessage(third, token), "it failed")
        topology.declare("default", topology.Declaration("w@host.celery.pidbox", False, True, None))
        topology.bind("default", "celery.pidbox", "", "w@host.celery.pidbox")
        assert topology.extend("default", [topology.Declaration("gone", False, True, None)]) == {"gone"}
        DeclaredQueue.objects.update(expires_at=Now() - timedelta(1))
        assert "w@host.celery.pidbox" in topology.delete_expired("default")
        backend = celery_app.backend
        backend.set_chord_size("a chord", 2)
        backend.store_result("a task", 1, "SUCCESS")
        backend.forget("a task")
        assert result_rows.delete_old("default") == 0
        with refused():
            Leader.objects.all().delete()
    assert PoisonMessage.objects.count() == 1


def test_who_looks_at_celerys_pages_changes_nothing(celery_app: Celery) -> None:
    celery_app.send_task("shop.bill", [1])
    with acting_as("inspector", "task_inspector"):
        assert BrokerQueue.objects.count() == 1
        assert DeclaredQueue.objects.get().name == "celery"
        assert topology.bindings("default") != []
        assert list(CeleryResult.objects.all()) == []
        with refused():
            DeclaredQueue.objects.all().delete()


def test_every_table_is_in_the_lists() -> None:
    tables = {
        model._meta.db_table
        for app in ("queueapp", "queueapp_celery", "queueapp_tasks")
        for model in apps.get_app_config(app).get_models()
    }
    for page in (POSTGRESQL, SQLSERVER):
        granted = {table for item in re.findall(r"GRANT[^;]+;", page) for table in re.findall(r"queueapp_\w+", item)}
        assert tables - granted == set()


def test_keys_are_looked_up_and_replaced_under_the_documented_grants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Leased._meta, "db_table", KeyedTransactional._meta.db_table)
    with acting_as("producer", "keyed_producer"):
        first = KeyedTransactional.send({"n": 1}, dedupe_key="a")
        assert KeyedTransactional.send({"n": 2}, dedupe_key="a", on_conflict="ignore") == first
        KeyedTransactional.send({"n": 3}, dedupe_key="a", delay=timedelta(hours=1))
        KeyedTransactional.send({"n": 4}, dedupe_key="a")
        assert KeyedTransactional.send_many([{"n": 5}], dedupe_key=lambda _: "a", on_conflict="ignore") == 0
        with refused():
            MessageKey.objects.all().delete()
    assert DelayedMessage.objects.count() == 0
    row = KeyedTransactional.objects.get()
    poison = PoisonMessage.objects.create(
        queue=KeyedTransactional._meta.label, message_id=uuid.uuid4(), headers=row.headers, body=row.body, reason="r"
    )
    with acting_as("inspector", "operator"):
        assert poison_operations.requeue(poison_operations.find([poison.pk])) == 0, "its key waits"
    row.delete()
    MessageKey.objects.update(changed_at=Now() - timedelta(days=1))
    monkeypatch.setattr(inbox, "queues", [KeyedTransactional])
    with acting_as("worker"):
        inbox.run_maintenance("default", lambda: True)
    assert not MessageKey.objects.exists()


def test_a_worker_keeps_its_inbox_early_acks_and_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Leased._meta, "db_table", Deferring._meta.db_table)
    early, late = uuid.uuid4(), uuid.uuid4()
    with acting_as("worker"):
        assert backend_of(connection).dedupe.record_processed(connection, inbox.TABLE, "key", "testapp.Leased")
        assert Deferring.ack(ids=[early, late]) == 0
    with acting_as("producer"):
        Deferring.send({"n": 1}, message_id=early)
        Deferring.send_many([{"n": 2}])
    assert Deferring.objects.count() == 1
    ProcessedMessage.objects.update(processed_at=Now() - timedelta(days=100))
    with acting_as("inspector"):
        assert queue_stats([Deferring])[0].deferred_ack_count == 1
    DeferredAck.objects.update(expires=Now() - timedelta(1))
    monkeypatch.setattr(inbox, "queues", [Deferring])
    with acting_as("worker"):
        inbox.run_maintenance("default", lambda: True)
        assert expiration.settle(Deferring, "default") == (0, 0)
        assert expiration.forget_old("default") == 1
        for last in (early, late):
            FairTurn.objects.update_or_create(queue="testapp.Leased", defaults={"last": last})
    assert not ProcessedMessage.objects.exists()


def test_keys_of_subjects_are_made_read_and_erased(settings: Any) -> None:
    settings.QUEUEAPP = {"KEYRING": lambda: {"only": b"k" * 32}}
    with acting_as("producer"):
        name, key = subject_keys.key_for("customer-7", "default")
    with acting_as("worker"):
        assert subject_keys.key_of(name, "default") == key
        with refused():
            subject_keys.erase_subject("customer-7")
    with acting_as("inspector", "operator"):
        assert subject_keys.erase_subject("customer-7") == 1
    keyring.forget()


def test_the_start_of_a_worker_reports_what_the_options_of_its_queues_need() -> None:
    queues = [Keyed, Deferring, Rated, RatedPerKey, Capped, InTurns, Followed, Grouped]
    with acting_as("inspector"):
        lacks = privileges.missing_privileges("default", queues)
        plain = privileges.missing_privileges("default", [Leased])
    found = {lack.model: lack.required for lack in lacks if lack.model not in queues}
    kinds: dict[Any, bool] = {MessageKey: False, DeferredAck: False, MessageResult: False}
    kinds |= dict.fromkeys([TokenBucket, KeyTokenBucket, ClaimRecord, FairTurn], True)
    kinds |= dict.fromkeys([MessageGroup, GroupMember, GroupAddition, GroupMessage], True)
    assert {model: found[model] for model in kinds} == kinds
    assert not kinds.keys() & {lack.model for lack in plain}
    with acting_as("worker"):
        assert privileges.missing_privileges("default", [Leased]) == []


def test_djangos_tasks_are_enqueued_run_and_read() -> None:
    with acting_as("enqueuer"):
        result = noop.enqueue(1)
        result.refresh()
        with refused():
            TaskQueue.objects.all().delete()
    sql = queue_sql(TaskQueue, connection)
    with acting_as("worker", "task_runner"):
        token = uuid.uuid4()
        ranges = [SeqRange(recipient="default", priority=level) for level in range(10)]
        (row,) = sql.claims.claim_by_lease(connection, ranges, 1, token, uuid.uuid4(), 60_000)
        assert sql.acks.ack(connection, [row[SEQ]], token) == 1
        Result.objects.create(id=result.id, status="FAILED", task="t", backend="default", enqueued_at=Now())
        Result.objects.update(status="SUCCESSFUL", started_at=Now(), finished_at=Now())
    with acting_as("enqueuer"):
        result.refresh()
        assert result.is_finished
    Result.objects.update(finished_at=Now() - timedelta(days=3))
    with acting_as("worker", "task_runner"):
        assert results.delete_old("default", "default", timedelta(days=1)) == 1


def test_a_broker_is_moved(celery_app: Celery) -> None:
    celery_app.send_task("shop.bill", [1])
    with acting_as("worker", "task_worker", "mover"), kombu.Connection("queueapp://") as conn:
        endpoint = QueueappEndpoint(conn)
        assert endpoint.queues() == ["celery"]
        endpoint.take_out("celery", 10)
        assert endpoint.put_back("celery") == 1
        endpoint.take_out("celery", 10)
        envelopes = endpoint.taken_out("celery")
        assert endpoint.put("celery", envelopes) == 1
        endpoint.confirm("celery", envelopes)
        endpoint.forget("celery", envelopes)
    assert not PendingMove.objects.exists()
    assert not CompletedMove.objects.exists()
    with acting_as("inspector", "task_inspector"):
        assert not PendingMove.objects.exists()
