"""RecoveryPoint: where a queue over a journaled topic begins, when it is first seen and when the point is changed."""

from __future__ import annotations

import threading
import zlib
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import transaction

from queueapp import InvalidOption, consumer, publish
from queueapp.journal.append import journal_of
from queueapp.models import JournalCopied, JournalCursor, JournalEntry
from queueapp.models.delivery import Delivery
from queueapp.topics.backfill import QueueFeeder
from tests.in_process_worker import DEADLINE, eventually, real_commits, starting_workers
from tests.listeners import wakeable
from tests.queueapp.journal.filling import filled, numbers, put, take
from tests.queueapp.sql.server import Server, outgoing
from tests.testapp.models import AddressedUrgent, Interop, Recovered, Wide
from tests.testapp.ordering import FencedByExpression

pytestmark = real_commits
TOPIC = "journaled.orders"


@pytest.fixture
def unknown(delivery: Any) -> Any:
    """Let publishers not know a queue for a while, as before it was there."""

    def hide(queue: Any = Recovered) -> Any:
        before = dict(queue.delivery.given)
        delivery(queue, underlying_topic="nothing", default_publish_target=None)
        return lambda **options: delivery(queue, **(before | options))

    return hide


def before(server: Server, unknown: Any, *part: int, **options: Any) -> None:
    """Publish before the queue is there."""
    show = unknown()
    put(server, TOPIC, *part)
    show(**options)


def test_recovery_point_epoch_fills_a_new_queue_from_the_beginning(server: Server, unknown: Any) -> None:
    before(server, unknown, 1, 2, 3)
    put(server, TOPIC, 4, 5)
    assert numbers(server, Recovered) == [4, 5]

    assert filled(server, Recovered, limit=2) == 3

    assert numbers(server, Recovered) == [4, 5, 1, 2, 3]
    assert filled(server, Recovered) == 0, "once"


@pytest.mark.parametrize("point", ["now", "creation"])
def test_recovery_point_now_takes_only_what_comes(server: Server, unknown: Any, point: str) -> None:
    before(server, unknown, 1, 2, recovery_point=point)

    assert filled(server, Recovered) == 0
    put(server, TOPIC, 3)
    assert filled(server, Recovered) == 0
    assert numbers(server, Recovered) == [3]


def test_recovery_point_bookmark_begins_with_that_message(server: Server, unknown: Any) -> None:
    before(server, unknown, 1, 2, 3)
    second = JournalEntry.objects.using(server.alias).order_by("seq")[1].seq
    unknown()(recovery_point=second)

    assert filled(server, Recovered) == 2
    assert numbers(server, Recovered) == [2, 3]


def test_recovery_point_before_what_is_kept_begins_with_what_is_kept(server: Server, unknown: Any) -> None:
    before(server, unknown, 1, 2, recovery_point=0)

    assert filled(server, Recovered) == 2


@pytest.mark.parametrize("as_text", [True, False])
def test_recovery_point_timestamp_begins_at_that_time(server: Server, unknown: Any, as_text: bool) -> None:
    show = unknown()
    put(server, TOPIC, 1)
    server.passed(lambda: JournalEntry.objects.using(server.alias).get().published_at)
    then = server.backend.now(server.connection)
    put(server, TOPIC, 2, 3)
    show(recovery_point=then.isoformat() if as_text else then)

    assert filled(server, Recovered) == 2
    assert numbers(server, Recovered) == [2, 3]


@pytest.mark.parametrize(
    "value", ["yesterday", "", -1, 2**63, True, None, datetime(2026, 1, 1), 1.5, "9999-12-31T23:59:59-14:00"]
)
def test_recovery_point_that_means_nothing_is_refused(value: Any) -> None:
    with pytest.raises(InvalidOption, match=r"recovery_point = .* is not accepted: it must be 'epoch', 'now'"):
        Delivery({"recovery_point": value}, "")


def test_recovery_point_that_was_changed_lets_the_queue_be_filled_from_there(server: Server, unknown: Any) -> None:
    before(server, unknown, 1, 2, recovery_point="now")
    put(server, TOPIC, 3)
    assert filled(server, Recovered) == 0

    unknown()(recovery_point="epoch")
    assert filled(server, Recovered) == 2
    assert numbers(server, Recovered) == [3, 1, 2]
    assert JournalCursor.objects.using(server.alias).get().recovery_point == "epoch"


def test_acked_messages_do_not_come_back(server: Server, unknown: Any) -> None:
    before(server, unknown, 1, 2)
    put(server, TOPIC, 3)
    filled(server, Recovered)
    take(server, Recovered, 3)

    unknown()(recovery_point=datetime(2020, 1, 1, tzinfo=UTC))
    assert filled(server, Recovered) == 0
    assert numbers(server, Recovered) == []


def test_recovery_point_that_was_moved_forward_drops_nothing(server: Server, unknown: Any) -> None:
    before(server, unknown, 1, 2)
    QueueFeeder(Recovered, server.alias).attach()
    unknown()(recovery_point="now")

    assert filled(server, Recovered) == 2, "they wait behind the cursor already"


def test_message_of_a_publisher_that_does_not_know_the_queue_enters_it_too(server: Server, unknown: Any) -> None:
    """Another version of the code, or another project."""
    filled(server, Recovered)
    before(server, unknown, 1)

    assert filled(server, Recovered) == 1


def test_queue_of_several_topics_is_filled_from_all_of_them(server: Server, delivery: Any) -> None:
    delivery(Wide, underlying_topic="nothing", default_publish_target=None)
    for n in range(4):
        put(server, ["journaled.orders", "journaled.wide", "journaled.other"][n % 3], n)
    delivery(Wide, underlying_topic="^journaled[.](orders|wide)", default_publish_target="journaled.wide")

    assert filled(server, Wide) == 3
    assert numbers(server, Wide) == [0, 1, 3]


def test_filter_is_evaluated_when_the_queue_is_filled(server: Server, unknown: Any) -> None:
    before(server, unknown, 1, 2, 3, filter="/n > 1")

    assert filled(server, Recovered) == 2
    assert numbers(server, Recovered) == [2, 3]


def test_filter_that_was_changed_lets_in_what_the_old_one_refused(server: Server, delivery: Any) -> None:
    delivery(Recovered, filter="/n > 2")
    filled(server, Recovered)
    put(server, TOPIC, 1, 2, 3)
    delivery(Recovered, filter="/n > 1")
    assert filled(server, Recovered) == 0, "by itself it is not looked at again"

    QueueFeeder(Recovered, server.alias).rebuild()
    assert filled(server, Recovered) == 1
    assert numbers(server, Recovered) == [3, 2]


def test_copy_is_what_the_queue_would_have_been_given(server: Server, unknown: Any, delivery: Any) -> None:
    show = unknown()
    identity = publish(
        TOPIC,
        {"n": 1},
        headers={"k": "v"},
        correlation_id="c",
        reply_to="r",
        expires_in=timedelta(hours=1),
        using=server.alias,
    )
    show()
    filled(server, Recovered)

    (message,), (entry,) = (model.objects.using(server.alias).all() for model in (Recovered, JournalEntry))
    assert (message.id, message.headers, message.body) == (identity, entry.headers, entry.body)
    assert (message.correlation_id, message.reply_to_address, message.expires) == ("c", "r", entry.expires)
    assert message.enqueued_at == entry.published_at, "its age counts from when it was published"


def test_expiration_of_a_copy_counts_from_when_it_was_published(server: Server, unknown: Any) -> None:
    before(server, unknown, 1, expiration=timedelta(minutes=5))
    filled(server, Recovered)

    (message,), (entry,) = (model.objects.using(server.alias).all() for model in (Recovered, JournalEntry))
    assert message.expires == entry.published_at + timedelta(minutes=5)


def test_two_that_fill_share_the_work(server: Server, unknown: Any) -> None:
    before(server, unknown, *range(300))
    fillers = [QueueFeeder(Recovered, server.alias) for _ in range(3)]
    errors: list[BaseException] = []

    def fill(feeder: QueueFeeder) -> None:
        from django.db import connections

        try:
            feeder.attach()
            while numbers(server, Recovered) != list(range(300)):
                feeder.fill(20)
        except BaseException as error:
            errors.append(error)
        finally:
            connections.close_all()

    threads = [threading.Thread(target=fill, args=(filler,)) for filler in fillers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    assert errors == []
    assert numbers(server, Recovered) == list(range(300))
    assert JournalCursor.objects.using(server.alias).get().copied == 300


def test_filling_that_is_rolled_back_loses_and_doubles_nothing(server: Server, unknown: Any) -> None:
    before(server, unknown, *range(10))
    feeder = QueueFeeder(Recovered, server.alias)
    feeder.attach()
    with transaction.atomic(using=server.alias):
        assert feeder.fill(4).copied == 4
        transaction.set_rollback(True, using=server.alias)
    assert numbers(server, Recovered) == []

    while feeder.fill(4).more:
        pass
    assert numbers(server, Recovered) == list(range(10))
    assert JournalCopied.objects.using(server.alias).count() == 10


def test_publishing_while_the_queue_is_attached_neither_loses_nor_doubles(server: Server, unknown: Any) -> None:
    """Publishers that know the queue and such that do not, with open transactions, around the moment it is attached."""
    show = unknown()
    late = server.another()
    journal = journal_of(late)
    with server.transaction(late):
        journal.append(late, TOPIC, [outgoing(b'{"n":1}')], [""])
        put(server, TOPIC, 2)
        show()
        put(server, TOPIC, 3)
        assert filled(server, Recovered) == 0, "the first may still come in"
        put(server, TOPIC, 4)
    put(server, TOPIC, 5)

    assert filled(server, Recovered) == 2
    assert sorted(numbers(server, Recovered)) == [1, 2, 3, 4, 5]


def test_recipients_get_a_copy_each(server: Server, delivery: Any) -> None:
    delivery(AddressedUrgent, underlying_topic="nothing")
    put(server, TOPIC, 1)
    delivery(AddressedUrgent, underlying_topic=TOPIC)

    assert filled(server, AddressedUrgent) == 1
    assert AddressedUrgent.objects.using(server.alias).count() >= 1


def test_foreign_headers_are_written_in_a_copy_as_well(server: Server, delivery: Any) -> None:
    delivery(Interop, underlying_topic="nothing")
    put(server, TOPIC, 1)
    delivery(Interop, underlying_topic=TOPIC)

    assert filled(server, Interop) == 1
    assert "NServiceBus.MessageId" in Interop.objects.using(server.alias).get().headers


def test_copy_is_encoded_as_the_queue_states(server: Server, unknown: Any) -> None:
    before(server, unknown, 1, encoding=("zlib",))
    filled(server, Recovered)

    (message,) = Recovered.objects.using(server.alias)
    assert zlib.decompress(message.body) == b'{"n":1}'
    with Recovered.receive(using=server.alias) as batch:
        assert [message.body for message in batch] == [{"n": 1}]


def test_copy_of_a_barrier_is_one_whatever_the_expression_states(server: Server, delivery: Any) -> None:
    put(server, TOPIC, 1)
    JournalEntry.objects.using(server.alias).update(is_barrier=True)
    delivery(FencedByExpression, underlying_topic=TOPIC)
    filled(server, FencedByExpression)

    assert FencedByExpression.objects.using(server.alias).get().is_barrier


@pytest.mark.usefixtures("no_consumers")
def test_worker_is_woken_by_what_is_filled(server: Server, unknown: Any, settings: Any) -> None:
    wakeable(server.alias)
    settings.QUEUEAPP = settings.QUEUEAPP | {"PEEK_DELAY": 3600.0}
    handled: list[Any] = []
    consumer(Recovered, name="handled")(lambda message: handled.append(message))
    before(server, unknown, 1)
    with starting_workers() as start:
        worker = start(Recovered, alias=server.alias, listener=True)
        eventually(lambda: worker.pump.stats.peeks)
        filled(server, Recovered)
        eventually(lambda: handled == [{"n": 1}])
