"""What a process says of itself in its rows: each breaker that is not disarmed, its consumers, the types it does not
know."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from queueapp import consumer
from queueapp.circuit_breaker import CircuitBreaker, RateBreaker
from queueapp.models import DISPATCHER, MAINTENANCE, NO_QUEUES, Now, QueueControl, Subscriber
from queueapp.services.delayed_dispatcher import DelayedDispatcher
from queueapp.services.leader_election import Elector
from queueapp.services.maintenance import Maintenance
from queueapp.services.orphaned_leases import release_orphaned_leases
from queueapp.services.subscriber_rows import ServiceHeartbeat
from tests.in_process_worker import Worker, eventually, real_commits
from tests.testapp.messages import Nop
from tests.testapp.models import Leased

pytestmark = [real_commits, pytest.mark.usefixtures("no_consumers")]
Start = Callable[..., Worker]


def told() -> list[dict[str, str]]:
    text = Subscriber.objects.get().breakers
    return json.loads(text) if text else []


def test_each_breaker_of_a_queue_is_told_and_taken_back(start_worker: Start, settings: Any) -> None:
    settings.QUEUEAPP = {"PEEK_DELAY": 0.1, "HEARTBEAT_INTERVAL": 0.1}
    consumer(Leased, name="tests")(lambda message: None)
    worker = start_worker(Leased, heartbeat=True)
    desk = worker.pump.state
    breakers = [*(one for one in desk.health.breakers if isinstance(one, CircuitBreaker)), desk.health.store_breaker]
    assert [one.name.split(" ")[0] for one in breakers] == ["Peek", "Receive", "Renewal", "Store"]
    for one in breakers[2:]:  # the first two a healthy look disarms at once
        one.failure(RuntimeError("it is broken"))
    eventually(lambda: [one["name"] for one in told()] == [
        "Renewal of leases of testapp.Leased", "Store of delayed messages in default",
    ])  # fmt: skip
    assert {(one["state"], one["error"]) for one in told()} == {("failing", "RuntimeError: it is broken")}
    for one in breakers:
        one.success()
    eventually(lambda: not told())


def test_a_worker_tells_its_consumers_and_the_types_it_does_not_know(start_worker: Start, settings: Any) -> None:
    settings.QUEUEAPP = {"PEEK_DELAY": 0.1, "HEARTBEAT_INTERVAL": 0.1}

    @consumer(Leased, name="tests.known")
    def known(message: Nop) -> None:
        pass

    Leased.send({"no": "type"})
    start_worker(Leased, heartbeat=True)
    eventually(lambda: Subscriber.objects.get().unknown_types == '[""]')
    ((name, kind),) = json.loads(Subscriber.objects.get().consumers)
    assert name == "tests.known"
    assert kind.endswith("Nop")


def test_a_dispatcher_and_the_housekeeping_tell_their_breakers_and_sign_off() -> None:
    dispatcher = DelayedDispatcher("default", uuid.uuid4())
    housekeeping = Maintenance("default", [], Elector("default", "housekeeping", uuid.uuid4()))
    for one in (*dispatcher.breakers, housekeeping.breaker):
        one.failure(RuntimeError("it is broken"))  # type: ignore[attr-defined]
    breakers = {DISPATCHER: dispatcher.breakers, MAINTENANCE: [housekeeping.breaker]}
    pulse = ServiceHeartbeat("default", breakers, uuid.uuid4())
    pulse.start()
    try:
        eventually(lambda: Subscriber.objects.count() == 2)
        names = {
            row.queue: [one["name"].split(" ")[0] for one in json.loads(row.breakers)]
            for row in Subscriber.objects.all()
        }
        assert names == {DISPATCHER: ["Fetch", "Dispatch", "Recovery"], MAINTENANCE: ["Maintenance"]}
    finally:
        assert pulse.stop(30)
    assert not Subscriber.objects.exists()


@pytest.mark.parametrize("name", NO_QUEUES)
def test_a_dead_dispatcher_or_housekeeper_is_forgotten_and_makes_nobody_careful(name: str) -> None:
    Subscriber.objects.create(
        queue=name, host="h", process=1, supervisor=uuid.uuid4(), alive_until=Now() - timedelta(hours=1)
    )
    left_alone: dict[uuid.UUID, str] = {}
    assert release_orphaned_leases("default", left_alone) == 0
    assert not Subscriber.objects.exists()
    assert not QueueControl.objects.exists()
    assert not left_alone


def test_failures_of_an_earlier_window_are_no_trouble_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    breaker = RateBreaker("Recovery", 1)
    breaker.failure(RuntimeError("once"))
    assert breaker.report() == {
        "breaker": "Recovery",
        "name": "Recovery",
        "state": "failing",
        "error": "RuntimeError: once",
    }
    breaker._window_started -= RateBreaker.WINDOW + 1
    assert breaker.report() is None
