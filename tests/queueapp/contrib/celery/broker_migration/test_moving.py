"""What arrives, and how: from Redis, back again, and from and to other brokers."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from queueapp.contrib.celery.broker_migration import Broker, Migrator
from queueapp.contrib.celery.broker_migration.envelope import key_of
from queueapp.contrib.celery.models import BrokerQueue, CompletedMove, PendingMove
from queueapp.models import DelayedMessage
from tests.in_process_worker import eventually

from .conftest import Shop, move

At = Callable[..., Broker]
Open = Callable[[str], Shop]


def nothing_is_remembered(alias: str) -> bool:
    return not PendingMove.objects.using(alias).exists() and not CompletedMove.objects.using(alias).exists()


def test_from_redis_every_queue_comes_in_its_order(
    alias: str, at: At, shop: Open, redis_url: str, ours_url: str
) -> None:
    there, here = shop(redis_url), shop(ours_url)
    for number in range(7):
        there.publish("shop.mail", number)
        there.publish("shop.pdf", 100 + number)

    migrator = move(at(redis_url), at(ours_url))

    assert migrator.moved == 14
    assert here.numbers("shop.mail") == list(range(7))
    assert here.numbers("shop.pdf") == [100 + number for number in range(7)]
    assert there.numbers("shop.mail") == []
    assert nothing_is_remembered(alias)


def test_a_message_arrives_as_it_was(alias: str, at: At, shop: Open, redis_url: str, ours_url: str) -> None:
    there, here = shop(redis_url), shop(ours_url)
    there.publish("mail", 1, reply_to="answers", headers={"lang": "py", "origin": "ü\u2028"})
    there.publish("mail", 2, compression="zlib")

    move(at(redis_url), at(ours_url))

    message, two = here.received("mail")
    assert message.headers["origin"] == "ü\u2028"
    assert message.headers["lang"] == "py"
    assert message.properties["reply_to"] == "answers"
    assert message.properties["correlation_id"] == message.headers["id"]
    assert (message.content_type, message.content_encoding) == ("application/json", "utf-8")
    assert message.decode() == [[1], {}, {}]
    assert two.decode() == [[2], {}, {}]


def test_a_deferred_task_waits_in_the_delayed_store(
    alias: str, at: At, shop: Open, redis_url: str, ours_url: str
) -> None:
    due = datetime.now(UTC) + timedelta(hours=1)
    shop(redis_url).publish("mail", 1, headers={"eta": due.isoformat()})

    move(at(redis_url), at(ours_url))

    row = DelayedMessage.objects.using(alias).get()
    assert (row.destination, row.recipient) == (BrokerQueue._meta.label, "mail")
    assert abs(row.due - due) < timedelta(seconds=1)


def test_priorities_of_redis_are_reversed(alias: str, at: At, shop: Open, redis_url: str, ours_url: str) -> None:
    there, here = shop(redis_url), shop(ours_url)
    for number, priority in enumerate([9, 0, 6, 3]):
        there.publish("mail", number, priority=priority)

    move(at(redis_url), at(ours_url))

    assert here.numbers("mail") == [1, 3, 2, 0]


def test_numbers_of_priorities_can_be_kept(alias: str, at: At, shop: Open, redis_url: str, ours_url: str) -> None:
    shop(redis_url).publish("mail", 1, priority=6)

    move(at(redis_url), at(ours_url), keep_priorities=True)

    assert BrokerQueue.objects.using(alias).get().priority == 6


def test_back_to_redis_in_order_with_delayed_messages(
    alias: str, at: At, shop: Open, redis_url: str, ours_url: str
) -> None:
    here, there = shop(ours_url), shop(redis_url)
    due = datetime.now(UTC) + timedelta(hours=1)
    here.publish("mail", 1, priority=0)
    here.publish("mail", 2, priority=9)
    here.publish("mail", 3, priority=0, headers={"eta": due.isoformat()})

    migrator = move(at(ours_url), at(redis_url))

    assert migrator.moved == 3
    found = there.received("mail")
    assert [message.decode()[0][0] for message in found] == [2, 1, 3]
    assert found[2].headers["eta"] == due.isoformat()
    assert not BrokerQueue.objects.using(alias).exists()
    assert not DelayedMessage.objects.using(alias).exists()
    assert nothing_is_remembered(alias)


def test_there_and_back_it_is_the_same_message(alias: str, at: At, shop: Open, redis_url: str, ours_url: str) -> None:
    there = shop(redis_url)
    there.publish("mail", 1, priority=3)

    move(at(redis_url), at(ours_url))
    move(at(ours_url), at(redis_url))

    (message,) = there.received("mail")
    assert message.properties["priority"] == 3
    assert message.headers["id"] == "00000000-0000-4000-8000-000000000001"
    assert message.decode() == [[1], {}, {}]


def test_a_move_waits_for_messages_in_flight_here(
    alias: str, at: At, shop: Open, redis_url: str, ours_url: str
) -> None:
    here = shop(ours_url)
    here.publish("mail", 1)
    message = here.channel.basic_get("mail", no_ack=False)
    source = at(ours_url)
    migrator = Migrator(source, at(redis_url))

    with migrator.exclusive(30):
        assert migrator.move("mail", lambda: None) == 0
        assert source.remaining("mail") == (0, 1)
        message.reject(requeue=True)
        eventually(lambda: source.remaining("mail") == (1, 0))
        assert migrator.move("mail", lambda: None) == 1

    assert shop(redis_url).numbers("mail") == [1]


def test_messages_that_kombu_did_not_write_stay(alias: str, at: At, shop: Open, redis_url: str, ours_url: str) -> None:
    shop(ours_url).publish("mail", 1)
    BrokerQueue.send({"odd": 1}, headers={"kombu": "no JSON"}, recipient="mail", unknown_recipient=True, using=alias)

    migrator = move(at(ours_url), at(redis_url))

    assert (migrator.moved, migrator.source.unreadable) == (1, 1)
    assert BrokerQueue.objects.using(alias).count() == 1


def test_keys_of_redis_with_a_prefix(alias: str, at: At, shop: Open, redis_url: str, ours_url: str) -> None:
    import kombu

    connection = kombu.Connection(redis_url, transport_options={"global_keyprefix": "shop:"})
    there = shop(redis_url)
    there.connection, there.channel = connection, connection.default_channel
    there.publish("mail", 1)

    move(at(redis_url, global_keyprefix="shop:"), at(ours_url))

    assert shop(ours_url).numbers("mail") == [1]


def test_another_broker_by_its_queues(alias: str, at: At, shop: Open, tmp_path: Path, ours_url: str) -> None:
    url = f"sqla+sqlite:///{tmp_path / 'broker.sqlite'}"
    there, here = shop(url), shop(ours_url)
    for number in range(45):
        there.publish("mail", number)
    migrator = Migrator(at(url), at(ours_url))
    assert not migrator.names_queues
    with migrator.exclusive(30):
        migrator.run(["mail"], follow=False, report_progress=lambda: None)
    assert migrator.moved == 45

    back = Migrator(at(ours_url), at(url))
    with back.exclusive(30):
        back.run(None, follow=False, report_progress=lambda: None)

    assert here.numbers("mail") == []
    assert sorted(there.numbers("mail")) == list(range(45))


def test_bindings_come_along(alias: str, at: At, shop: Open, redis_url: str, ours_url: str) -> None:
    import kombu

    there, here = shop(redis_url), shop(ours_url)
    topic = kombu.Exchange("news", "topic")
    kombu.Queue("sport", topic, "news.sport.#")(there.channel).declare()

    move(at(redis_url), at(ours_url))
    kombu.Producer(here.channel).publish("goal", exchange="news", routing_key="news.sport.today")

    assert [message.decode() for message in here.received("sport")] == ["goal"]


@pytest.mark.parametrize("both", ["redis", "ours"])
def test_two_brokers_of_which_none_is_ours_or_one_twice(
    alias: str, at: At, redis_url: str, ours_url: str, both: str
) -> None:
    url = redis_url if both == "redis" else ours_url
    with pytest.raises(Exception, match=r"One of the two brokers must be|Both URLs name"):
        Migrator(at(url), at(url))


def test_messages_are_identified_by_their_tag_or_their_content() -> None:
    def key(tag: object, body: str = "W10=", queue: str = "celery") -> str:
        properties = {"delivery_tag": tag, "correlation_id": "1"}
        return key_of(queue, {"headers": {"id": "1"}, "properties": properties, "body": body})

    first, second = "0a6b1f6e-0000-4000-8000-000000000001", "0a6b1f6e-0000-4000-8000-000000000002"
    assert key(first) == key(first, body="e30=") != key(second), "two that say the same are two"
    assert key(first) != key(first, queue="mail"), "a topic brought it into two queues"
    for counted in (7, "7", None):
        assert key(counted) == key(8) != key(counted, body="e30="), "a broker counts anew with each connection"
