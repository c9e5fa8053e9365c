"""Rows for the admin's pages: something in every state and on every page, some of it hostile, some of it very long."""

import json
import uuid
from datetime import timedelta
from typing import Any

from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.auth.models import User
from django.contrib.contenttypes.models import ContentType
from django.db import connection

from queueapp import messages
from queueapp.contrib.celery.models import Binding, BrokerQueue, CeleryResult, DeclaredQueue, PendingMove
from queueapp.contrib.tasks.models import Result
from queueapp.failures import poison_operations
from queueapp.journal.append import journal_of
from queueapp.models import (
    DISPATCHER,
    Alert,
    BulkOperation,
    DelayedMessage,
    GroupAddition,
    GroupMember,
    MessageGroup,
    MessageResult,
    Now,
    PoisonMessage,
    PoisonNote,
    Schedule,
    SubjectKey,
    Subscriber,
    Subscription,
)
from queueapp.operations import control
from queueapp.sql.message_columns import Outgoing
from tests.testapp.models import Addressed, Capped, Leased, Transactional, Urgent

HOSTILE = "<script>window.pwned=1</script><img src=x onerror='window.pwned=1'>\u202e"
#: What real failures look like: a reason as long as its column, and names that have no place to break.
LONG_REASON = (
    "OperationalError: consuming input failed: server closed the connection unexpectedly. This probably means the "
    "server "
    "terminated abnormally before or while processing the request. " + "at_some_place_without_a_blank." * 11
)[:500]
SUBJECT = f"customer {'z' * 150} <b>0042</b>"
LONG_NAME = "company.departments.reservations.consumers.rebooking.RebookThePassengersOfADelayedFlight"


def operator() -> User:
    """The superuser who does everything here."""
    return User.objects.filter(username="operator").first() or User.objects.create_superuser("operator", password="x")


def poison(count: int, **values: Any) -> None:
    defaults = {
        "queue": "testapp.Leased",
        "reason": "ValueError: no gate",
        "exception_type": "ValueError",
        "group_key": "a",
        "body": b"{}",
    }
    PoisonMessage.objects.bulk_create(
        PoisonMessage(**{"message_id": messages.new_id(), **defaults, **values}) for _ in range(count)
    )


def everything() -> None:
    """Something in every state and on every page."""
    trouble = [{"name": "Renewal of leases of testapp.Leased", "state": "failing", "error": LONG_REASON}]
    common = {"supervisor": uuid.uuid4(), "version": "2026.11.22+0123456789ab"}
    live = Subscriber.objects.create(
        queue="testapp.Leased", host="worker-1.reservations.eu-central.example.com", process=1234567,
        received=123_456_789, handled=123_456_780, failed=9, outstanding=500, concurrency=32,
        breakers=json.dumps(trouble), alive_until=Now() + timedelta(minutes=9), **common,
    )  # fmt: skip
    Subscriber.objects.create(queue="testapp.Urgent", host="w-2", process=8, alive_until=Now() - timedelta(1), **common)
    Subscriber.objects.create(
        queue=DISPATCHER, host="w-2", process=9, alive_until=Now() + timedelta(minutes=9), **common
    )
    Schedule.objects.create(
        name="nightly report of reservations", queue="testapp.Leased", cron="0 3 * * *", timezone="Europe/Vienna",
        next_at=Now() + timedelta(hours=3), due_at=Now() + timedelta(hours=3), runs=12, failures=2, error=LONG_REASON,
    )  # fmt: skip
    Leased.send_many({"n": n, "text": HOSTILE} for n in range(12))
    first, second, third, fourth, *_ = Leased.objects.values_list("pk", flat=True)
    lease = {"lease_token": uuid.uuid4(), "lease_owner": live.pk, "deliveries": 1}
    Leased.objects.filter(pk=first).update(lease_expires=Now() + timedelta(minutes=9), **lease)
    Leased.objects.filter(pk=second).update(lease_expires=Now() - timedelta(minutes=9), **lease)
    Leased.objects.filter(pk=third).update(expires=Now() - timedelta(minutes=9))
    Leased.objects.filter(pk=fourth).update(
        headers=json.dumps({"type": LONG_NAME, "trace": "z" * 300}), enqueued_at=Now() - timedelta(days=3, hours=4)
    )
    Urgent.send(b"\x00\xff" * 500, priority=2)
    Leased.send({"n": 1}, delay=timedelta(hours=1))
    Leased.send({"n": 2}, delay=timedelta(0))
    DelayedMessage.objects.filter(pk=DelayedMessage.objects.latest("pk").pk).update(
        destination=LONG_NAME, headers=json.dumps({"type": LONG_NAME})
    )
    poison(3)
    PoisonNote.objects.create(group_key="a", text=f"{HOSTILE} {LONG_REASON}"[:1000], username=LONG_NAME[:150])
    for number, (kind, queue, name, text) in enumerate(
        (
            ("poison", "", "e" * 64, LONG_REASON),
            ("depth", LONG_NAME, "", "testapp.Leased: 12,345 messages wait, more than 1000"),
            ("dead_worker", LONG_NAME, "worker-1.reservations.eu-central.example.com", HOSTILE),
            ("age", "testapp.Leased", "", "testapp.Leased: the oldest message waits for 3h 4m, more than 5m"),
        )
    ):
        over = (
            {"resolved_at": Now() - timedelta(minutes=1), "pending_channels": ""}
            if number == 3
            else {"pending_channels": "webhook,email"}
        )
        Alert.objects.create(
            key=str(number), kind=kind, queue=queue, name=name, text=text, tries=3,
            notified_at=Now() - timedelta(minutes=5), next_try=Now() + timedelta(minutes=1), **over,
        )  # fmt: skip
    for state in ("finished", "stopped", "paused", "running"):
        BulkOperation.objects.create(
            action="requeue", source="queueapp.PoisonMessage", filters=json.dumps({"queue": LONG_NAME}), rate=100,
            first=1, last=1_000_000, cursor=420_000, changed=400_000, skipped=19_999, failed=1, state=state,
            errors=json.dumps([[7, LONG_REASON], [8, HOSTILE]]), username=LONG_NAME, note=LONG_REASON[:500],
        )  # fmt: skip
    for name, completed in ((LONG_NAME, None), (HOSTILE, Now())):
        group = MessageGroup.objects.create(
            id=uuid.uuid4(),
            name=name,
            completed_at=completed,
            done=9 if completed else None,
            failed=3 if completed else None,
        )
        GroupAddition.objects.create(group_id=group.id, members=12)
        for outcome in GroupMember.Outcome:
            GroupMember.objects.create(message_id=uuid.uuid4(), group_id=group.id, outcome=outcome)
    for error, value in (("", HOSTILE.encode()), (LONG_REASON, None)):
        MessageResult.objects.create(
            id=uuid.uuid4(), queue=LONG_NAME, error=error, body=value, attempts=3, started_at=Now(),
            finished_at=Now(), expires_at=Now() + timedelta(days=1),
        )  # fmt: skip
    SubjectKey.objects.create(subject=SUBJECT, wrapped=b"x", key="only")
    failure = {"at": "2026-11-20T10:11:12.345678+00:00", "verdict": "RetryLater", "host": "worker-1"}
    history = [{**failure, "attempt": n, "process": "1234567:Thread-1", "exception": LONG_REASON} for n in (1, 2, 3)]
    poison(
        1, reason=LONG_REASON, consumer=LONG_NAME, message_type=LONG_NAME, exception_type=LONG_NAME, attempts=3,
        failures=json.dumps(history), exception_message=LONG_REASON, traceback=f"Traceback:\n  {LONG_REASON}\n" * 3,
        headers=json.dumps({"type": LONG_NAME, "trace": "z" * 300}), body=b'{"text": "' + b"long " * 200 + b'"}',
    )  # fmt: skip
    poison(1, queue="shop.GoneWithItsApp", headers="no JSON, but {", body=None)
    poison(
        1,
        headers=json.dumps({"content-type": "application/json+aes256gcm", "encryption-key": "gone"}),
        body=b"\0\xff" * 40,
    )
    poison(1, status=PoisonMessage.Status.ARCHIVED, reason=HOSTILE, traceback=HOSTILE, exception_message=HOSTILE)
    edited()
    control.pause(Transactional, by=operator())
    control.set_option(Capped, "max_backlog", 3)
    control.set_option(Leased, "lease_period", timedelta(days=1, seconds=30))
    journal = journal_of(connection)
    for topic, body in (("orders", b'{"n": 1}'), (LONG_NAME[:150], HOSTILE.encode())):
        journal.append(
            connection,
            topic,
            [Outgoing(messages.new_id(), json.dumps({"type": LONG_NAME}), body) for _ in range(3)],
            3 * [""],
        )
    for state in (Result.Status.FAILED, Result.Status.SUCCESSFUL, Result.Status.READY):
        Result.objects.create(
            id=uuid.uuid4(),
            status=state,
            task=LONG_NAME,
            queue_name="testapp.Leased",
            backend="default",
            enqueued_at=Now(),
            started_at=Now(),
            body=b'{"args": ["' + b"long " * 50 + b'"], "kwargs": {}}',
            errors=json.dumps([[LONG_NAME, LONG_REASON]]),
            worker_ids=json.dumps(["worker-1.reservations.eu-central.example.com:1234567"]),
        )
    celery_results()
    celery_queues()
    consumers()


def edited() -> None:
    """A poison message that was edited and requeued, and its copy that has failed as well."""
    poison(1, body=b'{"gate": ', queue=Capped._meta.label)
    original = PoisonMessage.objects.latest("pk")
    copy = poison_operations.edit_and_requeue(original.pk, body=b'{"gate": "B12"}')
    poison(1, edit_of=original.message_id, message_id=copy)
    LogEntry.objects.create(
        user=operator(), content_type=ContentType.objects.get_for_model(PoisonMessage), object_id=str(original.pk),
        object_repr=str(original), action_flag=CHANGE, change_message=f"Edited and requeued as {copy}.",
    )  # fmt: skip


def consumers() -> None:
    """One with a live worker, one without a worker while copies wait for it, and one of a queue that is no
    more."""
    label, kind = Addressed._meta.label, f"tests.{LONG_NAME}"
    Subscriber.objects.create(
        queue=label, host="w-3", process=10, supervisor=uuid.uuid4(), alive_until=Now() + timedelta(minutes=9),
        consumers=json.dumps([["invoices", kind]]),
    )  # fmt: skip
    names = [(label, "invoices"), (label, LONG_NAME), ("shop.GoneWithItsApp", HOSTILE)]
    Subscription.objects.bulk_create(Subscription(queue=q, consumer=c, type_name=kind) for q, c in names)
    Addressed.send_many([{"n": n} for n in range(3)], recipient=LONG_NAME)


def celery_results() -> None:
    """Tasks of Celery's that have ended well, badly, and not yet."""
    names = {
        "name": LONG_NAME,
        "worker": "celery@worker-1.reservations.eu-central.example.com",
        "queue": LONG_NAME[:200],
    }
    ends = {"expires_at": Now() + timedelta(days=1), "date_done": Now() - timedelta(seconds=90), "retries": 3}
    CeleryResult.objects.create(
        task_id=str(uuid.uuid4()),
        status="SUCCESS",
        result=json.dumps({"text": HOSTILE, "n": list(range(40))}),
        **names,
        **ends,
    )
    CeleryResult.objects.create(task_id="z" * 255, status="PROGRESS" * 6, result="{}")
    CeleryResult.objects.create(
        task_id=str(uuid.uuid4()),
        status="FAILURE",
        result=json.dumps({"exc_type": LONG_NAME, "exc_message": [LONG_REASON]}),
        traceback=f"Traceback:\n  {LONG_REASON}\n" * 3,
        args='["' + "long " * 100 + '"]',
        kwargs="{}",
        **names,
        **ends,
        children=json.dumps([[[str(uuid.uuid4()), None], None]]),
        meta=json.dumps({"group_id": str(uuid.uuid4())}),
    )


def celery_queues() -> None:
    """Queues that programs have declared, with long and hostile names, and a message that is being moved."""
    long = f"{LONG_NAME}.{'z' * 100}"
    DeclaredQueue.objects.create(name=long, durable=True, arguments=json.dumps({"x-message-ttl": 5, "x": LONG_REASON}))
    DeclaredQueue.objects.create(
        name=f"{HOSTILE} a:b", auto_delete=True, expires_ms=60_000, expires_at=Now() + timedelta(minutes=1)
    )
    for number in range(5):
        Binding.objects.create(exchange=LONG_NAME, routing_key=f"{LONG_NAME}.{number}.{'z' * 100}", queue=long)
    BrokerQueue.send(b"{}", recipient=long)
    BrokerQueue.send(b"{}", recipient=long, delay=timedelta(hours=1))
    PendingMove.objects.create(
        message_id=uuid.uuid4(), queue=long, headers=json.dumps({"type": LONG_NAME, "kombu": LONG_REASON}),
        body=json.dumps({"text": HOSTILE, "reason": LONG_REASON}).encode(),
    )  # fmt: skip
