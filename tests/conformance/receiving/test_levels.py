"""A message whose priority is none of its queue's levels (a foreign producer, fewer levels than there were) is received
as if it had the nearest one."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from queueapp import consumer, sql
from queueapp.services import maintenance
from queueapp.services.leader_election import Elector
from queueapp.services.maintenance import Maintenance, clamp_priorities
from queueapp.services.service import Service, stop_all
from tests.conformance.endpoint import Endpoint, modes
from tests.in_process_worker import DEADLINE, eventually
from tests.testapp.models import AddressedUrgent, Urgent

#: Lowest and highest that the column takes, and the neighbours of levels 0 to 2.
STRANGE = [-(2**15), -1, 3, 2**15 - 1]


@pytest.fixture
def set_levels() -> Iterator[Callable[[int], None]]:
    """Changes the number of levels, as a deploy does.

    What is built on this is taken down before it: a thread that still ran could otherwise leave statements for the
    other number of levels to every later test.
    """
    before = Urgent.delivery.priorities

    def change(levels: int) -> None:
        Urgent.delivery.priorities = levels
        sql.forget()

    yield change
    change(before)


@pytest.fixture
def urgent(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, set_levels: Any) -> Iterator[Endpoint]:
    """A queue with three levels, in the semantics of ``endpoint``."""
    monkeypatch.setattr(Urgent.delivery, "semantics", endpoint.queue.delivery.semantics)
    urgent = Endpoint(Urgent, endpoint.alias, endpoint.tag)
    yield urgent
    urgent.close()


@pytest.fixture
def run_maintenance(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, set_levels: Any
) -> Iterator[Callable[[], None]]:
    monkeypatch.setattr(maintenance, "LEVELS_INTERVAL", 0.0)
    services: list[Service] = []

    def start() -> None:
        leadership = Elector(endpoint.alias, "maintenance", uuid.uuid4())
        services.append(Maintenance(endpoint.alias, [Urgent], leadership))
        for service in services:
            service.start()

    yield start
    assert stop_all(services, DEADLINE)


def send(urgent: Endpoint, priorities: list[int], first: int = 0) -> None:
    """As a writer does that knows nothing of levels; numbered in this order."""
    for number, priority in enumerate(priorities, first):
        identity = urgent.send(number)
        urgent.rows.filter(id=identity).update(priority=priority)


@modes("NRS")
def test_when_a_priority_is_none_of_the_levels_should_be_handled_as_of_the_nearest(urgent: Endpoint) -> None:
    urgent.handle()
    send(urgent, [*STRANGE, 0, 1, 2])
    assert clamp_priorities(Urgent, urgent.alias) == dict.fromkeys(STRANGE, 1)
    assert not clamp_priorities(Urgent, urgent.alias)
    urgent.start(concurrency=1)

    eventually(lambda: len(urgent.calls) == 7)
    assert [number for number, _ in urgent.calls] == [2, 3, 6, 5, 0, 1, 4]


@modes("NRS")
def test_when_it_lies_behind_what_was_handled_since_should_be_found(
    urgent: Endpoint, run_maintenance: Callable[[], None]
) -> None:
    urgent.handle()
    send(urgent, [9, -300])
    urgent.send_many(20, priority=2)
    urgent.send_many(20, priority=0)
    worker = urgent.start(concurrency=2)
    eventually(lambda: len(urgent.calls) == 40)
    eventually(lambda: urgent.rows.count() == 2)
    last = max(urgent.rows.values_list("seq", flat=True))
    low = {(level.recipient, level.priority): level.low for level in worker.pump.marks.ahead()}
    assert low["", 2] > last
    assert low["", 0] > last
    urgent.calls.clear()

    run_maintenance()

    eventually(lambda: urgent.numbers == [0, 1])
    urgent.wait_until_empty()
    assert worker.running


@modes("NRS")
def test_when_it_arrives_at_a_worker_that_is_idle_should_be_found(
    urgent: Endpoint, run_maintenance: Callable[[], None]
) -> None:
    urgent.handle()
    urgent.start()
    run_maintenance()

    send(urgent, STRANGE)

    eventually(lambda: urgent.numbers == [0, 1, 2, 3])


@modes("NRS")
def test_when_it_is_received_without_a_worker_should_be_found(urgent: Endpoint) -> None:
    send(urgent, [*STRANGE, 1])
    found: list[int] = []

    for expected in ([4, 2], [3, 0], [1], []):
        with Urgent.receive(2, using=urgent.alias) as batch:
            got = [message.body["number"] for message in batch]
            for message in batch:
                message.ack()
        assert got == expected
        found += got

    assert urgent.is_empty()


@modes("NRS")
def test_when_a_deploy_lowers_the_levels_should_handle_what_has_one_of_the_others(
    urgent: Endpoint, run_maintenance: Callable[[], None], set_levels: Callable[[int], None]
) -> None:
    urgent.handle()
    for number, priority in enumerate((2, 1, 0, 2)):
        urgent.send(number, priority=priority)
    set_levels(2)

    urgent.start(concurrency=1)
    run_maintenance()

    eventually(lambda: urgent.numbers == [0, 1, 2, 3])


@modes("R")
def test_when_messages_have_no_level_should_report_it_once_an_hour(
    urgent: Endpoint,
    run_maintenance: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def reported() -> list[Any]:
        return [record.getMessage() for record in caplog.get_records("call") if "queue's levels" in record.getMessage()]

    send(urgent, [9, 9, -1])
    run_maintenance()
    eventually(reported)
    send(urgent, [7])
    eventually(lambda: not urgent.rows.exclude(priority__in=[0, 1, 2]).exists())

    assert reported() == [
        "testapp.Urgent: moved 3 messages with a priority outside of the queue's levels, 0 to 2, to the nearest level: "
        "2 from priority 9, 1 from priority -1."
    ]


@pytest.mark.usefixtures("no_consumers")
def test_when_it_is_addressed_to_a_former_name_should_be_moved_too(transactional_db: None) -> None:
    consumer(AddressedUrgent, name="new", aliases=["old"])(lambda message: None)
    for recipient in ("new", "old"):
        AddressedUrgent.send(1, recipient=recipient, unknown_recipient=True)
    AddressedUrgent.objects.update(priority=9)

    assert clamp_priorities(AddressedUrgent, "default") == {9: 2}


@pytest.mark.usefixtures("no_consumers")
def test_when_no_consumer_has_its_recipient_should_be_moved_too(transactional_db: None) -> None:
    consumer(AddressedUrgent, name="a.consumer")(lambda message: None)
    AddressedUrgent.send(1)
    AddressedUrgent.objects.update(priority=9, recipient="")

    assert clamp_priorities(AddressedUrgent, "default") == {9: 1}
