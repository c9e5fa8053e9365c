"""Statistics per Celery queue, beside those of the table that holds all of them."""

from __future__ import annotations

import json
from datetime import timedelta
from io import StringIO
from typing import Any

import kombu
import pytest
from django.core.management import CommandError, call_command
from django.db import connections
from django.test.utils import CaptureQueriesContext

from queueapp.alerts import conditions, store
from queueapp.contrib.celery import queue_stats as module
from queueapp.contrib.celery.models import BrokerQueue
from queueapp.models import Alert, Now
from queueapp.operations import statistics
from queueapp.operations.statistics import QueueStats, queue_stats

from .consuming import Consume, drained, publish, rows


@pytest.fixture(autouse=True)
def of_this_database(alias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("django.db.router.db_for_read", lambda *given, **named: alias)


def found() -> dict[str, QueueStats]:
    return {stats.queue: stats for stats in queue_stats() if stats.queue.startswith("celery:")}


def test_each_queue_has_its_own_figures(conn: Any, alias: str) -> None:
    for name in ("mail", "bills", "idle"):
        conn.default_channel.queue_declare(name, durable=True)
    conn.default_channel.queue_declare("w@host.celery.pidbox", auto_delete=True)
    publish(conn, "x", "y", queue="mail")
    publish(conn, "z", queue="bills")
    publish(conn, "command", queue="w@host.celery.pidbox")
    conn.Producer().publish("later", routing_key="mail", headers={"eta": "2099-01-01T00:00:00+00:00"})
    conn.Producer().publish("short", routing_key="bills", expiration=60)
    rows(alias).filter(recipient="mail").update(enqueued_at=Now() - timedelta(seconds=100))
    rows(alias).exclude(expires=None).update(expires=Now() - timedelta(seconds=1))
    rows(alias).filter(recipient="bills", expires=None).update(lease_expires=Now() + timedelta(minutes=1))

    stats = found()

    assert sorted(stats) == ["celery:(control)", "celery:bills", "celery:idle", "celery:mail"]
    mail, bills = stats["celery:mail"], stats["celery:bills"]
    assert (mail.waiting, mail.leased, mail.delayed, mail.exact) == (2, 0, 1, True)
    assert 99 < (mail.oldest_seconds or 0) < 130
    assert (bills.waiting, bills.leased, bills.expired) == (0, 1, 1)
    assert (stats["celery:idle"].waiting, stats["celery:idle"].oldest_seconds) == (0, None)
    assert stats["celery:(control)"].waiting == 1


def test_a_poison_message_counts_for_its_queue(conn: Any, consume: Consume) -> None:
    conn.default_channel.queue_declare("mail", durable=True)
    publish(conn, "x", queue="mail")
    messages = consume("mail")
    drained(conn)
    messages[0].reject()

    assert found()["celery:mail"].poison == 1


def test_the_number_of_statements_does_not_depend_on_the_queues(conn: kombu.Connection, alias: str) -> None:
    def statements() -> int:
        with CaptureQueriesContext(connections[alias]) as queries:
            module._read(alias)
        return len(queries)

    conn.default_channel.queue_declare("q0", durable=True)
    before = statements()
    for number in range(1, 10):
        conn.default_channel.queue_declare(f"q{number}", durable=True)
        publish(conn, "x", queue=f"q{number}")

    assert statements() == before


def test_a_large_table_gives_lower_bounds(conn: Any, alias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "LIMIT", 3)
    conn.default_channel.queue_declare("mail", durable=True)
    publish(conn, *range(5), queue="mail")

    mail = found()["celery:mail"]

    assert (mail.waiting, mail.exact) == (3, False)
    assert BrokerQueue.objects.using(alias).count() == 5


def test_a_celery_queue_is_named_in_commands_and_over_http(conn: Any) -> None:
    for name in ("mail", "bills"):
        conn.default_channel.queue_declare(name, durable=True)
    publish(conn, *range(5), queue="mail")
    text, scaled = StringIO(), StringIO()

    call_command("queuestats", "celery:mail", stdout=text)
    call_command("autoscale", "celery:mail", "celery:bills", "--per-worker", "2", stdout=scaled)

    assert [line.split()[:2] for line in text.getvalue().splitlines()[1:]] == [["celery:mail", "5"]]
    assert [(load["queue"], load["desired"]) for load in json.loads(scaled.getvalue())] == [
        ("celery:mail", 3), ("celery:bills", 0),
    ]  # fmt: skip
    with pytest.raises(CommandError, match=r"There is no queue 'celery:mial'.*Did you mean 'celery:mail'"):
        call_command("queuestats", "celery:mial")


def test_a_celery_queue_beyond_its_bound_is_an_alert_until_its_bound_goes(conn: Any, alias: str, settings: Any) -> None:
    conn.default_channel.queue_declare("mail", durable=True)
    publish(conn, *range(3), queue="mail")

    def open_alerts() -> list[str]:
        store.reconcile(alias, conditions.evaluate(alias, []), set())
        return [open_alert["text"] for open_alert in store.open_alerts(alias)]

    settings.QUEUEAPP = {"ALERTS": {"max_waiting": {"*": 1}}}
    assert open_alerts() == [], "a bound for all queues is not for what is within one"
    settings.QUEUEAPP = {"ALERTS": {"max_waiting": {"celery:mail": 2, "celery:gone": 2}}}
    assert open_alerts() == ["celery:mail: more than 2 messages wait"]
    settings.QUEUEAPP = {"ALERTS": {"max_waiting": {"*": 1}}}
    assert open_alerts() == []
    Alert.objects.using(alias).all().delete()
