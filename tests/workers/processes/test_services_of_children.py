"""Which child of a tree dispatches and which runs maintenance, in which databases, and which log line reports an
unattended service."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from queueapp import consumer
from queueapp.consuming.registry import registered
from queueapp.models import DISPATCHER, MAINTENANCE, Now
from queueapp.services import service
from queueapp.services.delayed_dispatcher import DelayedDispatcher, Forwarder
from queueapp.services.journal_service import JournalService
from queueapp.services.listener import Listener
from queueapp.services.maintenance import AlertEvaluator, Maintenance
from queueapp.services.subscriber_rows import ServiceHeartbeat
from tests.databases import known_as
from tests.testapp.models import Deep, ForeignPostgres, Leased, Short, Transactional
from workers.processes.child import ChildOptions, ShutdownStages, run_dispatcher
from workers.processes.supervisor import Supervisor
from workers.processes.until_empty import NOTHING, DrainCheck, is_empty, remaining

WAREHOUSE = "warehouse"


class Routes:
    def db_for_write(self, model: Any, **hints: Any) -> str | None:
        return WAREHOUSE if model is Transactional else None


@pytest.fixture(autouse=True)
def warehouse(settings: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Transactional lies there, and the default database keeps delayed messages for it."""
    settings.DATABASE_ROUTERS = [Routes()]
    monkeypatch.setattr(Transactional.delivery, "delayed_in", ("default",))
    with known_as(WAREHOUSE):
        yield


# -- the tree ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "role", "runs_maintenance", "aliases", "lacking"),
    [
        ({}, "dispatcher", True, ["default", WAREHOUSE], []),
        ({"maintenance": False}, "dispatcher", False, ["default", WAREHOUSE], [MAINTENANCE]),
        ({"dispatcher": False}, "maintenance", True, [WAREHOUSE], [DISPATCHER]),
    ],
)
def test_one_child_does_both_or_one_of_it_where_the_queues_are_or_are_delayed(
    options: dict[str, bool], role: str, runs_maintenance: bool, aliases: list[str], lacking: list[str]
) -> None:
    *workers, child = Supervisor([Transactional], processes=2, **options).children

    assert (child.name, child.options.role) == (role, role)
    assert (child.options.runs_maintenance, child.options.aliases) == (runs_maintenance, aliases)
    assert [set(worker.options.lacking) for worker in workers] == [set(lacking), set()], "one says it for all"


def test_a_tree_that_does_neither_has_workers_alone() -> None:
    children = Supervisor([Leased], processes=2, dispatcher=False, maintenance=False).children

    assert [item.options.role for item in children] == ["worker", "worker"]
    assert set(children[0].options.lacking) == {DISPATCHER, MAINTENANCE}


def test_without_queues_it_is_the_default_database_that_is_looked_after() -> None:
    (child,) = Supervisor([]).children

    assert (child.options.role, child.options.aliases) == ("dispatcher", ["default"])


# -- the process -------------------------------------------------------------------------------------------------------


def services_of(monkeypatch: pytest.MonkeyPatch, role: str, *, runs_maintenance: bool, aliases: list[str]) -> list[Any]:
    """The services that such a process would start."""
    found: list[Any] = []
    monkeypatch.setattr(service.Service, "start", lambda self, *given: found.append(self))
    monkeypatch.setattr(service.Service, "join", lambda self, *given: None)
    stages = ShutdownStages()
    stages.stopping.set()
    options = ChildOptions(role, [], str(uuid.uuid4()), aliases=aliases, runs_maintenance=runs_maintenance)
    assert run_dispatcher(options, stages) == 0
    return found


def of(kind: type, found: list[Any]) -> list[Any]:
    return [item for item in found if type(item) is kind]


def test_a_process_that_does_both(monkeypatch: pytest.MonkeyPatch) -> None:
    found = services_of(monkeypatch, "dispatcher", runs_maintenance=True, aliases=["default", WAREHOUSE])

    assert [registration.alias for registration in of(DelayedDispatcher, found)] == ["default", WAREHOUSE]
    assert [(registration.alias, registration.target) for registration in of(Forwarder, found)] == [
        ("default", WAREHOUSE)
    ]
    here, there = of(Maintenance, found)
    assert there.queues == [Transactional]
    assert Leased in here.queues
    assert all(queue._meta.managed or registered.of(queue) for queue in here.queues)
    (first, _) = of(ServiceHeartbeat, found)
    names = {name: [item.name.split(" ")[0] for item in breaker] for name, (_, breaker) in first.breakers.items()}
    assert names == {
        DISPATCHER: ["Fetch", "Dispatch", "Recovery"] * 2,
        MAINTENANCE: ["Maintenance", "Evaluation", "Journal"],
    }, "those of the forwarder as well"
    dispatching = {item.elector.role for item in found if isinstance(item, DelayedDispatcher)}
    assert not dispatching & {here.elector.role, there.elector.role}, "each is elected for itself"


@pytest.mark.parametrize("role", ["dispatcher", "maintenance"])
def test_a_process_that_does_one_of_it(monkeypatch: pytest.MonkeyPatch, role: str) -> None:
    found = services_of(monkeypatch, role, runs_maintenance=role == "maintenance", aliases=["default"])

    dispatches = role == "dispatcher"
    assert [len(of(kind, found)) for kind in (DelayedDispatcher, Forwarder)] == [int(dispatches)] * 2
    assert [len(of(kind, found)) for kind in (Maintenance, JournalService)] == [int(not dispatches)] * 2
    assert len(of(Listener, found)) == 1, "either may be woken"
    (pulse,) = of(ServiceHeartbeat, found)
    assert list(pulse.breakers) == [DISPATCHER if dispatches else MAINTENANCE]


def test_a_wake_up_wakes_the_dispatcher_and_the_forwarder_of_its_own_database(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = services_of(monkeypatch, "dispatcher", runs_maintenance=False, aliases=["default", WAREHOUSE])
    woken: list[str] = []
    monkeypatch.setattr(service.Service, "wake", lambda self: woken.append(self.name))
    first, second = of(Listener, found)

    first.on_notify("delayed")
    assert woken == ["dispatcher-default", f"dispatcher-default for {WAREHOUSE}"]
    woken.clear()
    second.on_notify("delayed")
    assert woken == [f"dispatcher-{WAREHOUSE}"]
    second.on_notify("testapp.Leased")
    assert woken == [f"dispatcher-{WAREHOUSE}"]


@pytest.mark.django_db
@pytest.mark.parametrize("maintenance", [True, False])
def test_until_empty_does_not_wait_for_expired_messages(maintenance: bool) -> None:
    """The process that purges them may be another one, and may do so in minutes, or never."""
    Leased.send({}, expires_in=timedelta(hours=1))
    Leased.objects.update(expires=Now() - timedelta(hours=1))
    check = DrainCheck([Leased], runs_maintenance=maintenance)

    assert [check.is_done(lambda: False) for _ in range(2)] == [False, True]
    assert check.remaining is NOTHING
    assert remaining([Leased], runs_maintenance=maintenance) is NOTHING


@pytest.mark.django_db
def test_until_empty_does_not_wait_for_messages_that_expire_by_their_age() -> None:
    Short.send({})
    Short.objects.update(enqueued_at=Now() - timedelta(hours=1))
    assert is_empty([Short])

    Short.objects.update(lease_token=uuid.uuid4(), lease_expires=Now() + timedelta(hours=1))
    assert not is_empty([Short])


@pytest.mark.django_db
def test_until_empty_waits_for_a_handler_whose_message_has_expired_meanwhile() -> None:
    Leased.send({}, expires_in=timedelta(hours=1))
    Leased.objects.update(expires=Now() - timedelta(hours=1))
    check = DrainCheck([Leased], runs_maintenance=False)

    assert not any(check.is_done(lambda: True) for _ in range(3))


@pytest.mark.django_db
def test_until_empty_waits_for_an_expired_message_that_is_leased() -> None:
    Leased.send({}, expires_in=timedelta(hours=1))
    Leased.objects.update(
        expires=Now() - timedelta(hours=1), lease_token=uuid.uuid4(), lease_expires=Now() + timedelta(hours=1)
    )

    assert not is_empty([Leased])


def test_a_publication_wakes_who_fills_queues_from_the_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    found = services_of(monkeypatch, "maintenance", runs_maintenance=True, aliases=["default"])
    woken: list[str] = []
    monkeypatch.setattr(service.Service, "wake", lambda self: woken.append(self.name))
    (listener,) = of(Listener, found)

    listener.on_notify("journal")
    listener.on_notify("delayed")
    assert woken == ["journal-default"]


def test_without_journaled_topics_no_journal_service_runs(monkeypatch: pytest.MonkeyPatch, settings: Any) -> None:
    settings.QUEUEAPP = {}
    monkeypatch.setattr(Deep.delivery, "target_queue_depth", None)
    found = services_of(monkeypatch, "maintenance", runs_maintenance=True, aliases=["default"])

    assert of(JournalService, found) == []
    assert of(Listener, found) == []


def test_a_foreign_queue_with_a_consumer_is_maintained_and_so_are_its_alerts(
    monkeypatch: pytest.MonkeyPatch, settings: Any, no_consumers: None
) -> None:
    settings.QUEUEAPP = {"ALERTS": {"every": timedelta(seconds=30)}}
    consumer(ForeignPostgres, name="tests")(lambda message: None)
    found = services_of(monkeypatch, "maintenance", runs_maintenance=True, aliases=["default"])

    for (item,) in (of(Maintenance, found), of(AlertEvaluator, found)):
        assert ForeignPostgres in item.queues
