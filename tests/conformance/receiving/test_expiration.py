"""Messages whose time is over are not handled, in any receiver (time to be received)."""

from __future__ import annotations

import threading
import uuid
from datetime import timedelta
from typing import Any

from django.db.models import F

from queueapp import signals
from queueapp.models import Now
from queueapp.services.maintenance import purge_expired
from tests.conformance.endpoint import Endpoint, modes
from tests.in_process_worker import eventually

HOUR = timedelta(hours=1)


def let_expire(endpoint: Endpoint, count: int) -> None:
    """The first ``count`` messages expired a moment ago, by the database's clock."""
    first = list(endpoint.rows.order_by("seq").values_list("seq", flat=True)[:count])
    endpoint.rows.filter(seq__in=first).update(expires=Now() - timedelta(milliseconds=1))


@modes("NRS")
def test_when_using_ttbr_should_not_expire_by_default(endpoint: Endpoint) -> None:
    endpoint.send()

    assert endpoint.rows.get().expires is None


@modes("NRS")
def test_when_using_ttbr_should_ignore_a_header_alone(endpoint: Endpoint) -> None:
    endpoint.handle()
    endpoint.send(1, headers={"NServiceBus.TimeToBeReceived": "00:00:00.0010000"})

    assert endpoint.rows.get().expires is None
    endpoint.start()
    eventually(lambda: endpoint.numbers == [1])


@modes("NRS")
def test_when_using_ttbr_should_expire_by_the_clock_of_the_database(endpoint: Endpoint) -> None:
    endpoint.send(expires_in=HOUR)

    late = endpoint.rows.annotate(left=F("expires") - F("enqueued_at")).get().left - HOUR
    assert abs(late) < timedelta(seconds=5)


@modes("NRS")
def test_when_expired_messages_are_in_the_queue_should_handle_the_others_only(endpoint: Endpoint) -> None:
    endpoint.handle()
    endpoint.send_many(6, expires_in=HOUR)
    let_expire(endpoint, 3)
    endpoint.start()

    eventually(lambda: endpoint.numbers == [3, 4, 5])
    eventually(lambda: endpoint.rows.count() == 3)

    assert endpoint.numbers == [3, 4, 5]


@modes("NRS")
def test_when_purging_expired_messages_should_leave_live_ones(endpoint: Endpoint, settings: Any) -> None:
    settings.QUEUEAPP = settings.QUEUEAPP | {"PURGE_BATCH": 2}
    reported: list[tuple[int, list[uuid.UUID], str]] = []
    receiver = lambda sender, queue, count, ids, reason, **kwargs: reported.append((count, ids, reason))  # noqa: E731
    signals.expired.connect(receiver, sender=endpoint.queue)
    endpoint.send_many(5, expires_in=HOUR)
    endpoint.send(5)
    let_expire(endpoint, 3)
    due = set(endpoint.rows.filter(expires__lt=Now()).values_list("id", flat=True))

    assert purge_expired(endpoint.queue, endpoint.alias) == 3

    signals.expired.disconnect(receiver, sender=endpoint.queue)
    assert [(count, reason) for count, _, reason in reported] == [(2, "its time was over"), (1, "its time was over")]
    assert {identity for _, ids, _ in reported for identity in ids} == due
    assert endpoint.rows.count() == 3
    assert not endpoint.rows.filter(expires__lt=Now()).exists()


@modes("R")
def test_when_purging_expired_messages_should_leave_those_that_are_being_handled(endpoint: Endpoint) -> None:
    endpoint.send_many(2, expires_in=HOUR)
    with endpoint.queue.receive(using=endpoint.alias) as batch:
        (message,) = batch
        let_expire(endpoint, 2)

        assert purge_expired(endpoint.queue, endpoint.alias) == 1

        message.ack()
    assert endpoint.is_empty()


@modes("S")
def test_when_purging_expired_messages_should_not_wait_for_a_receiver(endpoint: Endpoint) -> None:
    endpoint.send_many(2, expires_in=HOUR)
    with endpoint.queue.receive(using=endpoint.alias) as batch:
        (message,) = batch
        purged: list[int] = []

        def purge() -> None:
            from django.db import connections

            endpoint.rows.exclude(seq=message.seq).update(expires=Now() - HOUR)
            purged.append(purge_expired(endpoint.queue, endpoint.alias))
            connections.close_all()

        second_thread = threading.Thread(target=purge)
        second_thread.start()
        second_thread.join(30)

        assert purged == [1]
        message.ack()


@modes("NRS")
def test_when_message_expires_while_it_is_handled_should_be_handled_to_its_end(endpoint: Endpoint) -> None:
    def act(message: Any, context: Any) -> None:
        endpoint.rows.update(expires=Now() - HOUR)

    endpoint.handle(act)
    endpoint.send(1, expires_in=HOUR)
    endpoint.start()

    endpoint.wait_until_empty()
    eventually(lambda: endpoint.numbers == [1])
