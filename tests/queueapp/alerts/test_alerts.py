"""Each channel is notified once when an alert fires and once when it is resolved, whichever process evaluates and
restarts."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
import uuid
from collections.abc import Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest
from django.core import mail
from django.core.management import CommandError, call_command
from django.db import OperationalError, connection

from queueapp import signals
from queueapp.alerts import channels, conditions, store
from queueapp.conf import settings as conf
from queueapp.errors import InvalidOption
from queueapp.models import Alert, BulkOperation, Now, PoisonMessage, Subscriber
from queueapp.operations import requeue_after_deploy, statistics
from queueapp.services import connection_timeouts
from queueapp.services.leader_election import Elector
from queueapp.services.maintenance import AlertEvaluator, Maintenance
from queueapp.services.orphaned_leases import release_orphaned_leases
from tests.databases import DATABASES, marks_of
from tests.in_process_worker import eventually
from tests.testapp.models import Leased, Short

ON_EACH = pytest.mark.parametrize(
    "alias", [pytest.param(alias, id=kind, marks=marks_of(alias)) for kind, alias in DATABASES.items()]
)


class Webhook:
    """A real server that keeps what it is sent."""

    def __init__(self) -> None:
        self.status = 204
        self.hangs = threading.Event()
        self.received: list[dict[str, Any]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                while outer.hangs.is_set():
                    threading.Event().wait(0.05)
                if outer.status < 300:
                    outer.received.append(json.loads(body))
                self.send_response(outer.status)
                if outer.status == 302:
                    self.send_header("Location", "http://127.0.0.1:1/")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/hook"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    webhook = Webhook()
    yield webhook
    webhook.close()


@pytest.fixture
def notifications() -> Iterator[list[channels.Notification]]:
    """Notifications of the signal."""
    heard: list[channels.Notification] = []

    def hear(alert: channels.Notification, **_: Any) -> None:
        heard.append(alert)

    signals.alerted.connect(hear)
    yield heard
    signals.alerted.disconnect(hear)


def alerting(alias: str = "default") -> AlertEvaluator:
    """One that evaluates for this database, as any leader after any restart."""
    house = Maintenance(alias, [Leased, Short], Elector(alias, "tests", uuid.uuid4()))
    return AlertEvaluator(alias, [Leased, Short], house)


def poison(group: str, alias: str = "default", queue: str = "testapp.Leased") -> None:
    PoisonMessage.objects.using(alias).create(
        queue=queue, message_id=uuid.uuid4(), reason="r", group_key=group, exception_type="ValueError", consumer="pack"
    )


@pytest.mark.django_db(transaction=True)
def test_a_canary_that_stopped_for_its_failures_is_an_alert_until_the_next_one(
    settings: Any, notifications: list[channels.Notification]
) -> None:
    settings.QUEUEAPP = {"ALERTS": {"poison": False, "max_waiting": 1000}}
    poison("a")

    def canary(version: str, **values: Any) -> None:
        BulkOperation.objects.create(
            action=requeue_after_deploy.ACTION, source="queueapp.PoisonMessage", first=1, last=9, cursor=1,
            filters=json.dumps({"queue": "testapp.Leased", "group": "a"}),
            options=json.dumps({"version": version, "budget": 2}), **values,
        )  # fmt: skip
        alerting().evaluate()

    canary("1", state="stopped")
    canary("2", state="stopped", failed=2, changed=5)
    assert not notifications, "an operator has stopped them, or another version"
    canary("3", state="stopped", failed=1)
    alerting().evaluate()
    (notice,) = notifications
    assert (notice.kind, notice.name) == ("canary", "a")
    assert notice.text == "testapp.Leased: version 3 still fails; the canary of a poison group has stopped"

    canary("4", state="running")
    assert [notification.resolved for notification in notifications] == [False, True]
    canary("5", state="stopped", failed=3, changed=5)
    PoisonMessage.objects.all().delete()
    alerting().evaluate()
    assert [notification.resolved for notification in notifications] == [False, True, False, True]


@ON_EACH
def test_a_new_poison_group_is_notified_once_and_once_when_it_is_resolved(
    settings: Any, alias: str, webhook: Webhook, notifications: list[channels.Notification]
) -> None:
    settings.QUEUEAPP = {"ALERTS": {"mail": ["ops@example.org"], "webhook": webhook.url}}
    poison("a", alias)
    alerting(alias).evaluate()
    poison("a", alias)
    alerting(alias).evaluate()  # a leader that was restarted

    (notice,) = notifications
    assert notice.text == "testapp.Leased: new poison in pack: ValueError"
    assert (notice.kind, notice.resolved, notice.database) == ("poison", False, alias)
    (posted,) = webhook.received
    assert posted["text"] == "Alert: testapp.Leased: new poison in pack: ValueError"
    assert (posted["state"], posted["kind"]) == ("firing", "poison")
    (sent,) = mail.outbox
    assert sent.to == ["ops@example.org"]
    assert sent.subject.endswith("Alert: testapp.Leased: new poison in pack: ValueError")

    poison("b", alias)
    alerting(alias).evaluate()
    assert len(notifications) == 2, "another group is another alert"

    PoisonMessage.objects.using(alias).filter(group_key="a").delete()
    alerting(alias).evaluate()
    alerting(alias).evaluate()
    assert [(notification.name, notification.resolved) for notification in notifications] == [
        ("a", False),
        ("b", False),
        ("a", True),
    ]
    assert mail.outbox[-1].subject.endswith("Resolved: testapp.Leased: new poison in pack: ValueError")
    assert [notification["state"] for notification in webhook.received] == ["firing", "firing", "resolved"]
    assert list(Alert.objects.using(alias).values_list("name", flat=True)) == ["b"]

    poison("a", alias)
    alerting(alias).evaluate()
    assert (notifications[-1].name, notifications[-1].resolved) == ("a", False), "it is new again"


@pytest.mark.django_db(transaction=True, available_apps=["queueapp", "tests.testapp"])
def test_a_limit_of_age_or_depth_is_notified_by_queue(
    settings: Any, notifications: list[channels.Notification]
) -> None:
    minute = timedelta(minutes=1)
    settings.QUEUEAPP = {"ALERTS": {"max_age": {"testapp.Leased": minute, "*": 60 * minute}, "max_waiting": 2}}
    item = alerting()
    Leased.send_many(range(2))
    item.evaluate()
    assert notifications == []

    Leased.objects.update(enqueued_at=Now() - 10 * minute)
    Leased.send(3)
    item.evaluate()
    assert sorted(notice.kind for notice in notifications) == ["age", "depth"]
    assert any(
        notice.text == "testapp.Leased: the oldest message has waited for more than 1m" for notice in notifications
    )
    assert any(notice.text == "testapp.Leased: more than 2 messages wait" for notice in notifications)

    Leased.objects.all().delete()
    item.evaluate()
    assert sorted(notice.kind for notice in notifications if notice.resolved) == ["age", "depth"]


@pytest.mark.django_db(transaction=True, available_apps=["queueapp", "tests.testapp"])
def test_a_figure_that_is_not_known_raises_nothing_and_resolves_nothing(
    settings: Any, notifications: list[channels.Notification], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.QUEUEAPP = {"ALERTS": {"max_waiting": 0}}
    Leased.send(1)
    alerting().evaluate()
    assert len(notifications) == 1

    unknown = [statistics.QueueStats("testapp.Leased", "t", "default", "", error="no privilege")]
    monkeypatch.setattr(statistics, "queue_stats", lambda queues=None: unknown)
    alerting().evaluate()
    assert len(notifications) == 1
    assert Alert.objects.get().resolved_at is None


def worker(alias: str = "default", **rest: Any) -> Subscriber:
    """A dead subscriber of process 7 on host h, unless the arguments say otherwise."""
    given = {
        "queue": "testapp.Leased",
        "host": "h",
        "process": 7,
        "process_start": "boot-1",
        "supervisor": uuid.uuid4(),
    }
    return Subscriber.objects.using(alias).create(**given | {"alive_until": Now() - timedelta(seconds=1)} | rest)


@ON_EACH
def test_a_dead_process_is_one_alert_whatever_queues_it_received_and_over_when_another_lives(
    settings: Any, alias: str, notifications: list[channels.Notification]
) -> None:
    settings.QUEUEAPP = {"ALERTS": {"max_waiting": 10**6}}
    worker(alias)
    worker(alias, queue="testapp.Short")
    worker(alias, queue="testapp.Short", process=8, receives=False)
    release_orphaned_leases(alias)
    store.send_notifications(alias, {"testapp.Leased", "testapp.Short"})

    assert not Subscriber.objects.using(alias).exists()
    (notice,) = notifications
    assert (notice.kind, notice.name) == ("dead_worker", "h:7")
    assert notice.text == "worker h:7 stopped without deregistering; it received testapp.Leased, testapp.Short"

    for started_at in (Now() - timedelta(hours=1), Now()):
        assert [notification.resolved for notification in notifications] == [False], (
            "a worker that lived beside it replaces no worker"
        )
        for queue in ("testapp.Leased", "testapp.Short"):
            row = worker(alias, queue=queue, process=9, alive_until=Now() + timedelta(hours=1))
            Subscriber.objects.using(alias).filter(pk=row.pk).update(started_at=started_at)
        store.reconcile(alias, conditions.Evaluation(), {"testapp.Leased", "testapp.Short"})
        store.send_notifications(alias, {"testapp.Leased", "testapp.Short"})
    store.reconcile(alias, conditions.Evaluation(), {"testapp.Leased", "testapp.Short"})
    store.send_notifications(alias, {"testapp.Leased", "testapp.Short"})
    assert [notification.resolved for notification in notifications] == [False, True]


@pytest.mark.django_db(transaction=True, available_apps=["queueapp", "tests.testapp"])
def test_each_dead_process_of_a_host_has_an_alert_of_its_own(
    settings: Any, notifications: list[channels.Notification]
) -> None:
    settings.QUEUEAPP = {"ALERTS": {"max_waiting": 10**6}}
    worker()
    worker(process=8)
    worker(process_start="boot-2")
    release_orphaned_leases("default")
    store.send_notifications("default", {"testapp.Leased"})
    assert sorted(notification.name for notification in notifications) == ["h:7", "h:7", "h:8"], (
        "a process id is used again after a reboot"
    )


@pytest.mark.django_db(transaction=True, available_apps=["queueapp", "tests.testapp"])
def test_the_text_of_an_open_alert_stays_true_while_the_queue_grows(
    settings: Any, notifications: list[channels.Notification]
) -> None:
    settings.QUEUEAPP = {"ALERTS": {"max_waiting": 2, "max_age": timedelta(minutes=1), "poison": False}}
    Leased.send_many(range(3))
    Leased.objects.update(enqueued_at=Now() - timedelta(minutes=5))
    alerting().evaluate()
    before = sorted(Alert.objects.values_list("text", flat=True))
    Leased.send_many(range(3))
    Leased.objects.update(enqueued_at=Now() - timedelta(minutes=50))
    alerting().evaluate()
    assert (
        sorted(Alert.objects.values_list("text", flat=True))
        == before
        == [
            "testapp.Leased: more than 2 messages wait",
            "testapp.Leased: the oldest message has waited for more than 1m",
        ]
    )


@pytest.mark.django_db(transaction=True, available_apps=["queueapp", "tests.testapp"])
@pytest.mark.parametrize(
    ("kind", "rules"),
    [("depth", {"poison": True}), ("age", {"poison": True}), ("poison", {"poison": False}),
     ("dead_worker", {"dead_worker": False})],
)  # fmt: skip
def test_an_alert_is_resolved_when_its_rule_is_gone(
    settings: Any, notifications: list[channels.Notification], kind: str, rules: dict[str, Any]
) -> None:
    settings.QUEUEAPP = {"ALERTS": {"max_waiting": 0, "max_age": timedelta(seconds=1)}}
    Leased.send(1)
    Leased.objects.update(enqueued_at=Now() - timedelta(minutes=5))
    poison("a")
    worker()
    release_orphaned_leases("default")
    alerting().evaluate()
    assert {notification.kind for notification in notifications} == {"depth", "age", "poison", "dead_worker"}

    settings.QUEUEAPP = {"ALERTS": {"max_waiting": 0, "max_age": timedelta(seconds=1)} | rules}
    if kind in ("depth", "age"):
        settings.QUEUEAPP["ALERTS"].pop({"depth": "max_waiting", "age": "max_age"}[kind])
        settings.QUEUEAPP = dict(settings.QUEUEAPP)
    notifications.clear()
    alerting().evaluate()
    assert {notification.kind for notification in notifications if notification.resolved} == {kind}
    assert not Alert.objects.filter(kind=kind).exists()


@pytest.mark.django_db(transaction=True, available_apps=["queueapp", "tests.testapp"])
def test_alerts_of_a_removed_queue_and_of_a_project_without_rules_are_closed(
    settings: Any, notifications: list[channels.Notification]
) -> None:
    settings.QUEUEAPP = {"ALERTS": {"max_waiting": 10}}
    Alert.objects.create(key="x", kind="depth", queue="testapp.Removed", text="x", pending_channels="")
    Alert.objects.create(key="y", kind="depth", queue="other.Queue", text="y", pending_channels="")
    alerting().evaluate()
    assert list(Alert.objects.filter(resolved_at=None).values_list("key", flat=True)) == ["y"]

    Alert.objects.create(key="z", kind="depth", queue="testapp.Leased", text="z", pending_channels="")
    assert store.close_without_settings("default", lambda: True) == 0, "there are rules"
    settings.QUEUEAPP = {}
    assert store.close_without_settings("default", lambda: True) >= 1
    assert list(Alert.objects.values_list("key", flat=True)) == ["y"], "of another project"


@pytest.mark.django_db(transaction=True, available_apps=["queueapp", "tests.testapp"])
@pytest.mark.parametrize("status", [500, 404, 302])
def test_a_webhook_that_fails_is_tried_again_and_the_others_are_not_notified_twice(
    settings: Any,
    webhook: Webhook,
    notifications: list[channels.Notification],
    status: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings.QUEUEAPP = {"ALERTS": {"mail": ["ops@example.org"], "webhook": webhook.url}}
    webhook.status = status
    poison("a")
    alerting().evaluate()
    assert (len(notifications), len(mail.outbox), webhook.received) == (1, 1, [])
    assert "could not be sent by webhook" in caplog.text
    assert webhook.url not in caplog.text, "an address is often a secret"
    alerting().evaluate()
    assert Alert.objects.get().tries == 1, "not before its time"

    webhook.status = 200
    Alert.objects.update(next_try=Now())
    alerting().evaluate()
    alerting().evaluate()
    assert (len(notifications), len(mail.outbox), len(webhook.received)) == (1, 1, 1)
    assert Alert.objects.get().pending_channels == ""


@pytest.mark.django_db(transaction=True, available_apps=["queueapp", "tests.testapp"])
def test_an_alert_that_fires_again_while_its_end_could_not_be_delivered_is_notified_again(
    settings: Any, webhook: Webhook, notifications: list[channels.Notification], caplog: pytest.LogCaptureFixture
) -> None:
    settings.QUEUEAPP = {"ALERTS": {"webhook": webhook.url}}
    poison("a")
    alerting().evaluate()
    since = Alert.objects.get().since
    webhook.status = 500
    PoisonMessage.objects.all().delete()
    alerting().evaluate()
    poison("a")
    alerting().evaluate()
    assert [notification.resolved for notification in notifications] == [False, True, False], (
        "a receiver that got the end gets the beginning"
    )
    assert Alert.objects.get().since > since
    assert caplog.text.count("Alert: testapp.Leased: new poison in pack: ValueError.") == 2

    webhook.status = 200
    Alert.objects.update(next_try=Now())
    alerting().evaluate()
    assert [notification["state"] for notification in webhook.received] == ["firing", "firing"]


@pytest.mark.django_db(transaction=True, available_apps=["queueapp", "tests.testapp"])
def test_an_alert_of_a_process_that_died_is_resolved(notifications: list[channels.Notification]) -> None:
    Alert.objects.create(
        key="x", kind="depth", queue="testapp.Leased", text="over", resolved_at=Now(), pending_channels=""
    )
    assert store.send_notifications("default", {"testapp.Leased"}) == 0
    assert not Alert.objects.exists()


@pytest.mark.django_db(transaction=True, available_apps=["queueapp", "tests.testapp"])
def test_two_leaders_at_once_report_each_alert_once(notifications: list[channels.Notification]) -> None:
    for name in ("a", "b"):
        Alert.objects.create(key=name, kind="depth", queue="testapp.Leased", text=name, pending_channels="signal")

    def another(**_: Any) -> None:
        store.send_notifications("default", {"testapp.Leased"})  # while the first one tells

    signals.alerted.connect(another)
    try:
        assert store.send_notifications("default", {"testapp.Leased"}) == 1
    finally:
        signals.alerted.disconnect(another)
    assert sorted(notification.text for notification in notifications) == ["a", "b"]


@pytest.mark.django_db(transaction=True, available_apps=["queueapp", "tests.testapp"])
def test_an_alert_that_continues_before_its_end_was_notified_is_not_notified(
    settings: Any, notifications: list[channels.Notification]
) -> None:
    settings.QUEUEAPP = {"ALERTS": {"max_waiting": 10}}
    poison("a")
    alerting().evaluate()
    store.reconcile("default", conditions.Evaluation(known={("poison", "testapp.Leased")}), ["testapp.Leased"])
    assert Alert.objects.get().resolved_at is not None
    (condition,) = conditions.evaluate("default", [Leased]).conditions[:1]
    assert not store.open_alert("default", condition)
    alerting().evaluate()
    assert (len(notifications), Alert.objects.get().resolved_at) == (1, None)


@pytest.mark.django_db(transaction=True, available_apps=["queueapp", "tests.testapp"])
def test_poison_of_a_queue_that_only_others_know_is_neither_reported_nor_over_here(
    settings: Any, notifications: list[channels.Notification]
) -> None:
    """Of another project on the database, or of the newer version in a rolling deploy."""
    settings.QUEUEAPP = {"ALERTS": {"max_waiting": 10**6}}
    poison("a")
    alerting().evaluate()
    second = alerting()
    second.queues = [Short]
    second.evaluate()
    poison("b")
    second.evaluate()
    assert [(notification.queue, notification.name, notification.resolved) for notification in notifications] == [
        ("testapp.Leased", "a", False)
    ]

    PoisonMessage.objects.all().delete()
    second.evaluate()
    assert len(notifications) == 1
    alerting().evaluate()
    assert (notifications[-1].name, notifications[-1].resolved) == ("a", True)


@pytest.mark.django_db(transaction=True, available_apps=["queueapp", "tests.testapp"])
def test_workers_of_the_queue_notify_and_others_only_where_there_are_none(
    settings: Any, notifications: list[channels.Notification]
) -> None:
    settings.QUEUEAPP = {"ALERTS": {"max_waiting": 10**6}}
    Alert.objects.create(key="x", kind="depth", queue="other.Queue", text="theirs", pending_channels="signal,mail")
    assert store.send_notifications("default", {"testapp.Leased"}) == 0
    Alert.objects.update(next_try=Now() - store.RETRY_DELAY)
    assert store.send_notifications("default", {"testapp.Leased"}) == 1
    assert [notification.text for notification in notifications] == ["theirs"]
    assert Alert.objects.get().pending_channels == "", "these settings have no addresses"


@pytest.mark.django_db(transaction=True, available_apps=["queueapp", "tests.testapp"])
def test_a_webhook_that_answers_byte_by_byte_is_not_waited_for(
    settings: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(channels, "TIMEOUT", 0.5)
    ended = threading.Event()

    def drip(server: socket.socket) -> None:
        client, _ = server.accept()
        with client, contextlib.suppress(OSError):
            client.sendall(b"HTTP/1.1 200 OK\r\nX: ")
            while not ended.wait(0.1):
                client.sendall(b"x")

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=drip, args=(server,), daemon=True).start()
        settings.QUEUEAPP = {"ALERTS": {"webhook": f"http://127.0.0.1:{server.getsockname()[1]}/"}}
        poison("a")
        alerting().evaluate()
        ended.set()
    assert "could not be sent by webhook: TimeoutError" in caplog.text
    assert Alert.objects.get().pending_channels == "webhook"


@pytest.mark.django_db(transaction=True, available_apps=["queueapp", "tests.testapp"])
def test_a_webhook_that_never_answers_is_given_up_at_last(settings: Any, caplog: pytest.LogCaptureFixture) -> None:
    settings.QUEUEAPP = {"ALERTS": {"webhook": "http://127.0.0.1:1/"}}
    poison("a")
    alerting().evaluate()
    assert Alert.objects.get().pending_channels == "webhook"
    assert re.search(r"sent by webhook: URLError: .*refused", caplog.text)
    Alert.objects.update(tries=store.MAX_TRIES - 1, next_try=Now())
    alerting().evaluate()
    assert Alert.objects.get().pending_channels == ""


@pytest.mark.django_db(transaction=True, available_apps=["queueapp", "tests.testapp"])
def test_a_webhook_that_hangs_does_not_block_maintenance(
    settings: Any, webhook: Webhook, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.QUEUEAPP = {"ALERTS": {"webhook": webhook.url, "every": timedelta(seconds=1)}, "HEARTBEAT_INTERVAL": 0.1}
    monkeypatch.setattr(channels, "TIMEOUT", 60.0)
    webhook.hangs.set()
    poison("a")
    house = Maintenance("default", [Leased], Elector("default", "tests", uuid.uuid4()))
    alert_evaluator = AlertEvaluator("default", [Leased], house)
    house.start()
    try:
        eventually(lambda: house.is_leader)
        alert_evaluator.start()
        eventually(lambda: Alert.objects.filter(tries=1).exists())
        Subscriber.objects.create(
            queue="testapp.Leased", host="h", process=1, supervisor=uuid.uuid4(), alive_until=Now() - timedelta(1)
        )
        eventually(lambda: not Subscriber.objects.exists())
        assert Alert.objects.filter(kind="poison", pending_channels="webhook").exists(), "it still waits for it"
        assert webhook.received == []
    finally:
        webhook.hangs.clear()
        assert alert_evaluator.stop(30)
        assert house.stop(30)


@pytest.mark.django_db(transaction=True, available_apps=["queueapp", "tests.testapp"])
def test_it_looks_as_often_as_the_settings_state_also_after_an_error(settings: Any) -> None:
    settings.QUEUEAPP = {"ALERTS": {"every": timedelta(seconds=1)}}
    looks: list[float] = []

    class Looking(AlertEvaluator):
        def evaluate(self) -> None:
            looks.append(monotonic())
            if len(looks) == 1:
                raise OperationalError("away")

    looking = Looking("default", [Leased], SimpleNamespace(is_leader=True))  # type: ignore[arg-type]
    looking.start()
    eventually(lambda: len(looks) >= 2)
    assert looking.stop(30)
    assert looks[1] - looks[0] > 0.9


@pytest.mark.django_db(transaction=True, available_apps=["queueapp", "tests.testapp"])
def test_each_statement_of_a_look_has_its_own_time_to_be_answered(settings: Any) -> None:
    """Of all together a busy database needs longer than one may take."""
    settings.QUEUEAPP = {"ALERTS": {"max_waiting": 1}}
    waited_since: list[float] = []

    def note(execute: Any, *statement: Any) -> Any:
        # The statement before.
        waited_since.append((connection_timeouts.deadline_of(threading.get_ident()) or (0.0,))[0])
        return execute(*statement)

    with connection.execute_wrapper(note):
        alerting().evaluate()
    assert len(waited_since) > 10
    assert len(set(waited_since)) > len(waited_since) - 5


@pytest.mark.django_db(transaction=True, available_apps=["queueapp", "tests.testapp"])
def test_who_does_not_lead_evaluates_nothing(settings: Any, notifications: list[channels.Notification]) -> None:
    settings.QUEUEAPP = {"ALERTS": {"every": timedelta(seconds=1)}}
    poison("a")
    thread = alerting()
    thread.start()
    eventually(lambda: thread.breaker.report() is None and thread.is_alive())
    assert thread.stop(30)
    assert notifications == []


@pytest.mark.django_db(transaction=True, available_apps=["queueapp", "tests.testapp"])
def test_what_another_project_has_raised_is_not_over_here(
    settings: Any, notifications: list[channels.Notification]
) -> None:
    settings.QUEUEAPP = {"ALERTS": {"max_waiting": 0, "poison": False, "dead_worker": False}}
    Alert.objects.create(key="x", kind="depth", queue="other.Queue", text="theirs")
    Alert.objects.create(key="y", kind="poison", queue="", text="not looked at here")
    poison("a")
    alerting().evaluate()
    assert notifications == []
    assert Alert.objects.filter(resolved_at=None).count() == 2


@pytest.mark.django_db(transaction=True, available_apps=["queueapp", "tests.testapp"])
def test_a_signal_receiver_that_raises_is_logged_and_the_alert_is_notified(
    settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    settings.QUEUEAPP = {"ALERTS": {"mail": ["ops@example.org"]}}

    def broken(**_: Any) -> None:
        raise ValueError("not now")

    signals.alerted.connect(broken)
    try:
        poison("a")
        alerting().evaluate()
    finally:
        signals.alerted.disconnect(broken)
    assert len(mail.outbox) == 1
    assert "not now" in caplog.text


@pytest.mark.django_db(transaction=True)
def test_a_test_alert_states_which_way_fails(
    settings: Any, webhook: Webhook, notifications: list[channels.Notification]
) -> None:
    settings.QUEUEAPP = {"ALERTS": {"mail": ["ops@example.org"], "webhook": webhook.url}}
    out = StringIO()
    call_command("alerts", "--test", stdout=out)
    assert out.getvalue().splitlines() == ["signal: sent", "mail: sent", "webhook: sent"]
    assert (notifications[0].kind, webhook.received[0]["kind"], notifications[0].resolved) == ("test", "test", False)

    webhook.status = 500
    with pytest.raises(CommandError, match="could not be sent by webhook"):
        call_command("alerts", "--test", stdout=out)
    assert out.getvalue().splitlines()[-1] == "webhook: HTTP 500"
    out = StringIO()
    with pytest.raises(CommandError, match="could not be sent by webhook"):
        call_command("alerts", "--test", "--json", stdout=out)
    assert [(load["channel"], load["sent"], load["error"]) for load in json.loads(out.getvalue())] == [
        ("signal", True, None),
        ("mail", True, None),
        ("webhook", False, "HTTP 500"),
    ]
    assert not Alert.objects.exists()


@pytest.mark.django_db(transaction=True)
def test_open_alerts_are_listed(settings: Any) -> None:
    out = StringIO()
    call_command("alerts", stdout=out)
    assert out.getvalue() == "No open alerts.\n"
    Alert.objects.create(key="x", kind="depth", queue="q", text="deep \x1b[2J")
    Alert.objects.create(key="y", kind="depth", queue="q", text="over", resolved_at=Now())
    out = StringIO()
    call_command("alerts", stdout=out)
    assert out.getvalue().endswith(" deep ⟨U+001B⟩[2J\n")
    out = StringIO()
    call_command("alerts", "--json", stdout=out)
    assert [load["queue"] for load in json.loads(out.getvalue())] == ["q"]


@pytest.mark.parametrize(
    "given",
    [
        {"mail": "ops@example.org"}, {"mail": ["not-an-address"]}, {"webhook": "ftp://x"}, {"max_age": 60},
        {"max_age": timedelta(0)}, {"max_waiting": -1},
        {"max_waiting": {"q": True}}, {"poison": 1}, {"every": timedelta(0)}, {"unknown": 1}, {"max_age": {1: timedelta(1)}},  # noqa: E501
    ],
)  # fmt: skip
def test_what_is_not_accepted_is_reported(settings: Any, given: Any) -> None:
    settings.QUEUEAPP = {"ALERTS": given}
    with pytest.raises(InvalidOption, match=r"QUEUEAPP\.ALERTS"):
        _ = conf.ALERTS
