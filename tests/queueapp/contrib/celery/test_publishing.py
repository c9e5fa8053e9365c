"""What is published: where it lands, when, and that it goes with the caller's transaction."""

from __future__ import annotations

import json
import threading
from datetime import UTC, datetime, timedelta
from typing import Any

import kombu
import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import connections, transaction
from django.http import HttpResponse
from django.test import Client
from django.urls import path
from kombu.exceptions import ChannelError

import queueapp.contrib.celery  # noqa: F401 - makes the URL known
from queueapp import delayed
from queueapp.contrib.celery import topology
from queueapp.contrib.celery.models import Binding, BrokerQueue, DeclaredQueue, Exchange
from queueapp.contrib.celery.serialization import priority_level
from queueapp.errors import InvalidMessage, InvalidOption
from queueapp.models import DelayedMessage, Now
from tests.kill_session import kill_this

from . import celeryapp


def rows(alias: str) -> Any:
    return BrokerQueue.objects.using(alias).order_by("seq")


def test_a_message_is_a_row_that_can_be_read(conn: Any, alias: str) -> None:
    headers = {"task": "shop.ship", "id": "0f9619ff-8b86-d011-b42d-00c04fc964ff", "retries": 0}

    conn.Producer().publish([[1], {}, {}], routing_key="celery", headers=headers, priority=4, correlation_id="c")

    row = rows(alias).get()
    assert (row.recipient, row.priority, str(row.id)) == ("celery", 4, headers["id"])
    assert json.loads(bytes(row.body)) == [[1], {}, {}]
    stored = json.loads(row.headers)
    assert (stored["type"], stored["content-type"]) == ("shop.ship", "application/json")
    assert json.loads(stored["kombu"])["headers"] == headers
    assert not {"delivery_tag", "body_encoding"} & {*json.loads(stored["kombu"])["properties"]}, (
        "of each delivery on its own"
    )


def test_a_transaction_takes_its_messages_with_it(conn: Any, alias: str) -> None:
    producer = conn.Producer()
    with transaction.atomic(using=alias):
        producer.publish("kept", routing_key="q", declare=[kombu.Queue("q")])
        assert rows(alias).count() == 1
        with transaction.atomic(using=alias):
            producer.publish("gone", routing_key="q")
            transaction.set_rollback(True, using=alias)

    assert [bytes(row.body) for row in rows(alias)] == [b"kept"]


def _bill(request: Any) -> HttpResponse:
    celeryapp.record.apply_async(["bill"], connection=request.META["conn"])
    if "fails" in request.GET:
        raise LookupError("after it has sent")
    return HttpResponse("sent")


urlpatterns = [path("bill", _bill)]


@pytest.mark.urls(__name__)
def test_delay_in_a_view_goes_with_the_transaction_of_the_request(
    conn: Any, alias: str, monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    monkeypatch.setitem(connections[alias].settings_dict, "ATOMIC_REQUESTS", True)
    settings.MIDDLEWARE = []
    client = Client(raise_request_exception=False)

    assert client.get("/bill?fails", conn=conn).status_code == 500
    assert not rows(alias).exists()

    assert client.get("/bill", conn=conn).status_code == 200
    assert [row.recipient for row in rows(alias)] == ["celery"]


def test_a_declaration_survives_a_rollback(conn: Any, alias: str) -> None:
    exchange = kombu.Exchange("letters", type="direct")
    queue = kombu.Queue("post", exchange, routing_key="by air")
    producer = conn.Producer()
    with transaction.atomic(using=alias):
        producer.publish("gone", exchange=exchange, routing_key="by air", declare=[queue])
        transaction.set_rollback(True, using=alias)

    producer.publish("kept", exchange=exchange, routing_key="by air", declare=[queue])

    assert [bytes(row.body) for row in rows(alias)] == [b"kept"]


def test_transactional_can_be_turned_off(alias: str) -> None:
    with (
        kombu.Connection(f"queueapp://{alias}", transport_options={"transactional": False}) as conn,
        transaction.atomic(using=alias),
    ):
        conn.Producer().publish("sent", routing_key="q")
        transaction.set_rollback(True, using=alias)

    assert rows(alias).count() == 1


def test_a_session_that_has_died_fails_no_publish_that_may_be_tried_again(conn: Any, alias: str) -> None:
    producer = conn.Producer()
    producer.publish("before", routing_key="q")
    kill_this(connections[alias])

    producer.publish("behind", routing_key="q", retry=True)

    assert [bytes(row.body) for row in rows(alias)] == [b"before", b"behind"]


def test_a_task_with_an_eta_is_a_delayed_message(conn: Any, alias: str) -> None:
    due = datetime.now(UTC) + timedelta(hours=1)
    conn.Producer().publish("x", routing_key="q", headers={"eta": due.isoformat()}, priority=7, expiration=7200)

    row = DelayedMessage.objects.using(alias).get()
    assert (row.destination, row.recipient, row.priority) == (BrokerQueue._meta.label, "q", 7)
    assert abs(row.due - due) < timedelta(seconds=1)
    assert row.expires is not None
    assert abs(row.expires - due - timedelta(hours=1)) < timedelta(seconds=30)  # two hours from now, not from then
    delayed.make_due(DelayedMessage.objects.using(alias).all())
    assert delayed.dispatch_due(alias, 10).moved == 1
    assert rows(alias).get().recipient == "q"


@pytest.mark.parametrize("eta", ["2001-01-01T00:00:00+00:00", "no time", "", None])
def test_due_and_unreadable_etas_are_not_delayed(conn: Any, alias: str, eta: Any) -> None:
    conn.Producer().publish("x", routing_key="q", headers={"eta": eta})

    assert rows(alias).count() == 1


def test_an_eta_through_an_exchange_reaches_every_bound_queue(conn: Any, alias: str) -> None:
    exchange = kombu.Exchange("all", type="fanout")
    queues = [kombu.Queue(name, exchange) for name in ("one", "two")]
    eta = (datetime.now(UTC) + timedelta(hours=1)).isoformat()

    conn.Producer().publish("x", exchange=exchange, declare=queues, headers={"eta": eta})

    assert {*DelayedMessage.objects.using(alias).values_list("recipient", flat=True)} == {"one", "two"}


def test_fanout_is_one_statement_and_skips_expired_queues(conn: Any, alias: str) -> None:
    exchange = kombu.Exchange("all", type="fanout")
    for name in ("one", "two", "old"):
        kombu.Queue(name, exchange, expires=60)(conn.default_channel).declare()
    DeclaredQueue.objects.using(alias).filter(pk="old").update(expires_at=Now() - timedelta(seconds=1))

    conn.Producer().publish("x", exchange=exchange)

    assert [row.recipient for row in rows(alias)] == ["one", "two"]


def test_another_process_sees_declarations(conn: Any, alias: str) -> None:
    """Another connection shares nothing with this one but the database."""
    exchange = kombu.Exchange("topics", type="topic")
    kombu.Queue("some", exchange, routing_key="a.*")(conn.default_channel).declare()

    with kombu.Connection(f"queueapp://{alias}") as second_connection:
        second_connection.Producer().publish("found", exchange="topics", routing_key="a.b")
        second_connection.Producer().publish("lost", exchange="topics", routing_key="b.b")

    assert [row.recipient for row in rows(alias)] == ["some"]
    assert Exchange.objects.using(alias).get().kind == "topic"


@pytest.mark.parametrize("kind", ["direct", "topic"])
def test_unroutable_messages_go_to_the_deadletter_queue(alias: str, kind: str) -> None:
    with kombu.Connection(f"queueapp://{alias}", transport_options={"deadletter_queue": "lost"}) as conn:
        exchange = kombu.Exchange("letters", type=kind)
        exchange(conn.default_channel).declare()
        with pytest.warns(UserWarning, match="could not be delivered"):
            conn.Producer().publish("x", exchange=exchange, routing_key="nowhere")

    assert rows(alias).get().recipient == "lost"


@pytest.mark.parametrize("through", ["", "letters"])
def test_the_shorter_of_two_times_to_live_counts(conn: Any, alias: str, through: str) -> None:
    exchange = kombu.Exchange("letters", type="direct") if through else kombu.Exchange("")
    queue = kombu.Queue("q", exchange, routing_key="q", message_ttl=60)
    for expiration in (None, 10, 600):
        conn.Producer().publish("x", exchange=exchange, routing_key="q", declare=[queue], expiration=expiration)

    remaining = [row.expires - row.enqueued_at for row in rows(alias)]
    assert [round(item.total_seconds()) for item in remaining] == [60, 10, 60]


def test_an_unused_queue_is_deleted_with_its_messages(conn: Any, alias: str) -> None:
    exchange = kombu.Exchange("all", type="fanout")
    kombu.Queue("kept", exchange)(conn.default_channel).declare()
    kombu.Queue("gone", exchange, expires=0.001)(conn.default_channel).declare()
    kombu.Queue("auto", auto_delete=True)(conn.default_channel).declare()
    times = DeclaredQueue.objects.using(alias).values_list("name", "expires_ms")
    assert {*times} == {("kept", None), ("gone", 1), ("auto", 60_000)}
    conn.default_channel.queue_delete("auto")
    conn.Producer().publish("x", routing_key="gone")
    DeclaredQueue.objects.using(alias).filter(pk="gone").update(expires_at=Now() - timedelta(seconds=1))

    assert topology.delete_expired(alias) == ["gone"]

    assert [*DeclaredQueue.objects.using(alias).values_list("pk", flat=True)] == ["kept"]
    assert [*Binding.objects.using(alias).values_list("queue", flat=True)] == ["kept"]
    assert not rows(alias).exists()


def test_two_reapers_do_not_meet(conn: Any, alias: str) -> None:
    for number in range(20):
        kombu.Queue(f"gone {number}", expires=1)(conn.default_channel).declare()
    DeclaredQueue.objects.using(alias).update(expires_at=Now() - timedelta(seconds=1))
    gone: list[str] = []

    def reap() -> None:
        gone.extend(topology.delete_expired(alias))
        connections[alias].close()

    threads = [threading.Thread(target=reap) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(gone) == sorted(f"gone {number}" for number in range(20))


def test_size_counts_ready_messages(conn: Any, alias: str) -> None:
    queue = kombu.Queue("q")(conn.default_channel)
    for number in range(3):
        conn.Producer().publish(number, routing_key="q", declare=[queue])
    message = queue.get()

    assert queue.queue_declare(passive=True).message_count == 2
    assert message is not None
    message.requeue()
    assert queue.queue_declare(passive=True).message_count == 3
    assert queue.purge() == 3


def test_an_undeclared_queue_is_not_found(conn: Any) -> None:
    with pytest.raises(ChannelError, match="no queue 'nowhere'"):
        kombu.Queue("nowhere")(conn.default_channel).queue_declare(passive=True)
    with pytest.raises(ChannelError, match="no exchange 'nowhere'"):
        kombu.Exchange("nowhere", passive=True)(conn.default_channel).declare(passive=True)


def test_bindings_can_be_taken_away(conn: Any, alias: str) -> None:
    exchange = kombu.Exchange("all", type="fanout")
    queue = kombu.Queue("q", exchange)(conn.default_channel)
    queue.declare()
    queue.unbind_from(exchange)

    conn.Producer().publish("x", exchange=exchange)

    assert not rows(alias).exists()
    queue.bind_to(exchange)
    exchange(conn.default_channel).delete(if_unused=True)
    assert Exchange.objects.using(alias).exists(), "it is used"
    exchange(conn.default_channel).delete()
    assert not Binding.objects.using(alias).filter(exchange="all").exists()
    assert not Exchange.objects.using(alias).exists()


def test_priorities_map_onto_the_levels() -> None:
    assert [priority_level(p) for p in (None, "x", -1, 0, 1, 8, 9, 10, 255)] == [0, 0, 0, 0, 1, 8, 9, 9, 9]


@pytest.mark.parametrize("queue", ["q" * 201, "a\0b"])
def test_a_name_that_no_column_takes_is_refused(conn: Any, queue: str) -> None:
    with pytest.raises(InvalidMessage, match="is not accepted"):
        conn.Producer().publish("x", routing_key=queue)
    with pytest.raises(InvalidMessage, match="is not accepted"):
        conn.default_channel.queue_declare(queue)


def test_the_longest_name_is_accepted(conn: Any, alias: str) -> None:
    conn.default_channel.queue_declare("q" * 200)
    conn.Producer().publish("x", routing_key="q" * 200)
    assert rows(alias).get().recipient == "q" * 200


def test_a_url_that_names_no_database_states_which_there_are() -> None:
    with pytest.raises(ImproperlyConfigured, match="queueapp://nowhere: DATABASES has no 'nowhere'"):
        kombu.Connection("queueapp://nowhere").connect()


@pytest.mark.parametrize("options", [{"max_prefetch": 0}, {"visibility_timeout": 0.1}, {"transactional": "yes"}])
def test_an_option_out_of_range_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption, match="broker_transport_options"):
        kombu.Connection("queueapp://", transport_options=options).connect()


def test_options_of_other_transports_are_left_alone(alias: str) -> None:
    options = {"fanout_prefix": True, "priority_steps": [0, 3], "visibility_timeout": 3600, "max_retries": 3}
    with kombu.Connection(f"queueapp://{alias}", transport_options=options) as conn:
        assert conn.connect()


NUL, HALF = "a\0b", "\ud83d"


def nested() -> list[Any]:
    found: list[Any] = []
    for _ in range(2000):
        found = [found]
    return found


@pytest.mark.parametrize(
    ("headers", "text"),
    [
        ({"id": "x" * 600}, "task id"),
        ({"id": NUL}, "task id"),
        ({"task": NUL}, "task name"),
        ({"id": HALF}, "headers"),
        ({"task": HALF}, "headers"),
        ({"x": nested()}, "headers"),
        ({"x": nested(), "y": datetime(2030, 1, 1)}, "headers"),
        ({"x": float("nan")}, "headers"),
        ({"x": [float("inf")]}, "headers"),
        ({"x": "\ud83d"}, "headers"),
        ({"x": datetime(2030, 1, 1), "y": float("nan")}, "headers"),
    ],
)
def test_a_task_that_no_worker_could_run_is_refused(
    conn: kombu.Connection, alias: str, headers: dict[str, Any], text: str
) -> None:
    with pytest.raises(InvalidMessage, match=f"The {text} .*not accepted"):
        conn.Producer().publish("x", routing_key="q", headers={"task": "shop.bill", "id": "1", **headers})

    assert not rows(alias).exists()


@pytest.mark.parametrize(
    "call",
    [
        lambda channel, name: channel.queue_declare(name),
        lambda channel, name: channel.queue_declare(name, passive=True),
        lambda channel, name: channel.queue_delete(name),
        lambda channel, name: channel.queue_purge(name),
        lambda channel, name: channel.queue_bind(name, "e", "k"),
        lambda channel, name: channel.queue_bind("q", name, "k"),
        lambda channel, name: channel.queue_bind("q", "e", name),
        lambda channel, name: channel.queue_unbind("q", "e", name),
        lambda channel, name: channel.exchange_declare(name),
        lambda channel, name: channel.exchange_delete(name),
        lambda channel, name: channel.basic_get(name),
        lambda channel, name: channel.basic_consume(name, False, print, "tag"),
        lambda channel, name: channel.connection.client.Producer().publish("x", routing_key=name),
        lambda channel, name: channel.connection.client.Producer().publish("x", exchange="e", routing_key=name),
        lambda channel, name: channel.connection.client.Producer().publish("x", exchange="e", routing_key="k" * 300),
        lambda channel, name: channel.connection.client.Producer().publish("x", exchange=name, routing_key="k"),
    ],
)
@pytest.mark.parametrize("name", [NUL, HALF], ids=["NUL", "half a pair"])
def test_a_name_that_no_database_stores_is_refused(conn: kombu.Connection, call: Any, name: str) -> None:
    with conn.channel() as channel, pytest.raises(InvalidMessage, match="is not accepted"):
        call(channel, name)
