"""What a process reports in its rows: each breaker that is not closed, its consumers, the types it does not
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


def breakers_of_rows() -> list[dict[str, str]]:
    text = Subscriber.objects.get().breakers
    return json.loads(text) if text else []


def test_each_breaker_of_a_queue_is_reported_and_withdrawn(start_worker: Start, settings: Any) -> None:
    settings.QUEUEAPP = {"PEEK_DELAY": 0.1, "HEARTBEAT_INTERVAL": 0.1}
    consumer(Leased, name="tests")(lambda message: None)
    worker = start_worker(Leased, heartbeat=True)
    state = worker.pump.state
    breakers = [
        *(item for item in state.health.breakers if isinstance(item, CircuitBreaker)),
        state.health.store_breaker,
    ]
    assert [item.name.split(" ")[0] for item in breakers] == ["Peek", "Receive", "Renewal", "Store"]
    for breaker in breakers[2:]:  # a healthy look closes the first two at once
        breaker.failure(RuntimeError("it is broken"))
    eventually(lambda: [item["name"] for item in breakers_of_rows()] == [
        "Renewal of leases of testapp.Leased", "Store of delayed messages in default",
    ])  # fmt: skip
    assert {(item["state"], item["error"]) for item in breakers_of_rows()} == {
        ("failing", "RuntimeError: it is broken")
    }
    for breaker in breakers:
        breaker.success()
    eventually(lambda: not breakers_of_rows())


def test_a_worker_reports_its_consumers_and_the_types_it_does_not_know(start_worker: Start, settings: Any) -> None:
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


def test_dispatcher_and_maintenance_report_their_breakers_and_deregister() -> None:
    dispatcher = DelayedDispatcher("default", uuid.uuid4())
    maintenance = Maintenance("default", [], Elector("default", "maintenance", uuid.uuid4()))
    for breaker in (*dispatcher.breakers, maintenance.breaker):
        breaker.failure(RuntimeError("it is broken"))  # type: ignore[attr-defined]
    breakers = {DISPATCHER: dispatcher.breakers, MAINTENANCE: [maintenance.breaker]}
    pulse = ServiceHeartbeat("default", breakers, uuid.uuid4())
    pulse.start()
    try:
        eventually(lambda: Subscriber.objects.count() == 2)
        names = {
            row.queue: [load["name"].split(" ")[0] for load in json.loads(row.breakers)]
            for row in Subscriber.objects.all()
        }
        assert names == {DISPATCHER: ["Fetch", "Dispatch", "Recovery"], MAINTENANCE: ["Maintenance"]}
    finally:
        assert pulse.stop(30)
    assert not Subscriber.objects.exists()


@pytest.mark.parametrize("name", NO_QUEUES)
def test_a_dead_dispatcher_or_maintenance_is_removed_and_starts_no_crash_tracking(name: str) -> None:
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
    breaker.window_started -= RateBreaker.WINDOW + 1
    assert breaker.report() is None
