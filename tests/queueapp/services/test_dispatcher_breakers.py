"""The dispatcher's breakers, each fed by its step alone, by real errors of the database or of a store; and its
settings."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, models

from queueapp import delayed
from queueapp.circuit_breaker import State
from queueapp.models import DelayedMessage, PoisonMessage
from queueapp.services.delayed_dispatcher import DelayedDispatcher
from queueapp.services.service import stop_all
from queueapp.signals import poisoned
from tests.in_process_worker import DEADLINE, eventually, real_commits
from tests.queueapp.delayed.stores import SampleStore
from tests.testapp.models import Leased

pytestmark = real_commits
Start = Callable[..., DelayedDispatcher]


@pytest.fixture
def start(settings: Any) -> Iterator[Start]:
    """Starts a dispatcher with these settings and without the breakers' waits."""
    started: list[DelayedDispatcher] = []

    def begin(**given: Any) -> DelayedDispatcher:
        settings.QUEUEAPP = getattr(settings, "QUEUEAPP", {}) | {"DISPATCH_INTERVAL": 0.05} | given
        delayed_dispatcher = DelayedDispatcher("default", uuid.uuid4())
        for breaker in (delayed_dispatcher.fetch_breaker, delayed_dispatcher.dispatch_breaker):
            breaker.waits = dict.fromkeys(State, 0.01)
        started.append(delayed_dispatcher)
        delayed_dispatcher.start()
        return delayed_dispatcher

    yield begin
    assert stop_all(started, DEADLINE)


@pytest.fixture
def sample(settings: Any) -> type[SampleStore]:
    SampleStore.reset()
    settings.QUEUEAPP = {"DELAYED_STORE": "tests.queueapp.delayed.stores.SampleStore"}
    return SampleStore


@pytest.fixture
def constrain() -> Iterator[Callable[[Any, models.Q], None]]:
    """Gives a table a constraint of the user's own, as far as the test goes."""
    made: list[tuple[Any, Any]] = []

    def constrain(model: Any, condition: models.Q) -> None:
        constraint = models.CheckConstraint(condition=condition, name=f"tests_{model._meta.model_name}_{len(made)}")
        with connection.schema_editor() as editor:
            editor.add_constraint(model, constraint)
        made.append((model, constraint))

    yield constrain
    for model, constraint in made:
        model._base_manager.all().delete()
        with connection.schema_editor() as editor:
            editor.remove_constraint(model, constraint)


@pytest.fixture
def refusing(constrain: Callable[[Any, models.Q], None]) -> None:
    """The table of this queue takes no message with correlation id "refused"."""
    constrain(Leased, models.Q(correlation_id__isnull=True) | ~models.Q(correlation_id="refused"))


def send_refused(count: int = 1) -> None:
    for _ in range(count):
        Leased.send({}, delay=timedelta(0), correlation_id="refused")


# -- dispatch --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("refusing")
@pytest.mark.parametrize(("seconds", "then"), [(0.001, State.OPEN), (3600, State.FAILING)])
def test_refused_forwards_feed_the_dispatch_breaker_though_nothing_is_retried(
    start: Start, seconds: float, then: State
) -> None:
    worker = start(TIME_TO_TRIGGER_DISPATCH_CIRCUIT_BREAKER=seconds, NUMBER_OF_RETRIES=0)

    for known in range(2):  # in two rounds
        send_refused()
        worker.wake()
        eventually(lambda known=known: PoisonMessage.objects.count() > known)

    eventually(lambda: worker.dispatch_breaker.state is then)
    eventually(lambda: worker.dispatch_breaker.failures == 2)
    assert "tests_leased_0" in worker.dispatch_breaker.last_error
    assert worker.fetch_breaker.state is State.CLOSED
    assert worker.recovery_breaker.state is State.CLOSED

    Leased.send({}, delay=timedelta(0))
    eventually(lambda: worker.dispatch_breaker.state is State.CLOSED)


@pytest.mark.usefixtures("refusing")
@pytest.mark.parametrize("retries", [0, 2])
def test_a_refused_forward_is_tried_as_often_as_the_setting_states(start: Start, retries: int) -> None:
    send_refused()
    worker = start(NUMBER_OF_RETRIES=retries)

    lost = eventually(PoisonMessage.objects.first)

    assert lost.attempts == retries + 1
    eventually(lambda: worker.dispatch_breaker.failures == retries + 1)


@pytest.mark.parametrize("retries", [0, 2])
def test_a_store_of_a_third_party_is_asked_as_often(
    start: Start, sample: type[SampleStore], retries: int, refusing: None
) -> None:
    send_refused()
    worker = start(NUMBER_OF_RETRIES=retries)

    lost = eventually(PoisonMessage.objects.first)

    assert lost.attempts == retries + 1
    eventually(lambda: worker.dispatch_breaker.failures == retries + 1)
    assert delayed.store_of("default").connection == []  # type: ignore[attr-defined]


def test_a_store_that_cannot_remove_feeds_the_dispatch_breaker(start: Start, sample: type[SampleStore]) -> None:
    sample.faults = {"remove": ConnectionError("gone")}
    Leased.send({}, delay=timedelta(0))
    worker = start()

    eventually(lambda: worker.dispatch_breaker.state is State.FAILING)

    assert not Leased.objects.exists(), "what was not removed was not sent"
    sample.faults = {}
    eventually(lambda: Leased.objects.count() == 1)
    assert worker.recovery_breaker.failures == 0


# -- fetch -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seconds", "then"), [(0.001, State.OPEN), (3600, State.FAILING)])
def test_a_table_that_cannot_be_read_feeds_the_fetch_breaker(start: Start, seconds: float, then: State) -> None:
    with connection.schema_editor() as editor:
        editor.alter_db_table(DelayedMessage, "queueapp_delayedmessage", "queueapp_elsewhere")
    try:
        worker = start(TIME_TO_TRIGGER_FETCH_CIRCUIT_BREAKER=seconds)
        eventually(lambda: worker.fetch_breaker.failures > 2)
        assert worker.fetch_breaker.state is then
        assert worker.dispatch_breaker.failures == 0
    finally:
        with connection.schema_editor() as editor:
            editor.alter_db_table(DelayedMessage, "queueapp_elsewhere", "queueapp_delayedmessage")
    eventually(lambda: worker.fetch_breaker.state is State.CLOSED)


@pytest.mark.parametrize("verb", ["setup_infrastructure", "initialize", "fetch_next_due", "next"])
def test_a_store_that_cannot_be_asked_feeds_the_fetch_breaker_and_keeps_no_delayed_retry_waiting(
    start: Start, sample: type[SampleStore], verb: str
) -> None:
    sample.faults = {verb: ConnectionError("away")}
    worker = start()

    eventually(lambda: worker.fetch_breaker.failures > 2)
    assert worker.recovery_breaker.failures == 0
    DelayedMessage.objects.create(destination="testapp.Leased", due="2000-01-01T00:00Z", message_id=uuid.uuid4())
    eventually(Leased.objects.exists)

    sample.faults = {}
    eventually(lambda: worker.fetch_breaker.state is State.CLOSED)


# -- recovery --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("refusing")
@pytest.mark.parametrize(("per_second", "then"), [(1, State.OPEN), (1000, State.FAILING)])
def test_a_database_that_cannot_count_a_refusal_feeds_the_recovery_breaker(
    start: Start, constrain: Callable[[Any, models.Q], None], per_second: int, then: State,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    constrain(DelayedMessage, models.Q(retries=0))
    send_refused()
    worker = start(MAXIMUM_RECOVERY_FAILURES_PER_SECOND=per_second, NUMBER_OF_RETRIES=5)

    eventually(lambda: worker.recovery_breaker.failures > 30)

    assert worker.recovery_breaker.state is then
    assert "tests_delayedmessage" in worker.recovery_breaker.last_error
    assert caplog.text.count("A round of the dispatcher of 'default' failed") <= 2
    assert DelayedMessage.objects.count() == 1, "nothing was changed"
    assert worker.fetch_breaker.failures == 0


@pytest.mark.usefixtures("refusing")
def test_a_store_that_cannot_count_a_refusal_feeds_the_recovery_breaker(
    start: Start, sample: type[SampleStore]
) -> None:
    sample.faults = {"increment_failure_count": ConnectionError("away")}
    send_refused()
    worker = start(NUMBER_OF_RETRIES=5)

    eventually(lambda: worker.recovery_breaker.failures > 1)

    assert "away" in worker.recovery_breaker.last_error
    assert worker.fetch_breaker.failures == 0


# -- rounds ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [3, 7])
def test_a_round_moves_as_many_as_the_setting_states(start: Start, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    for _ in range(10):
        Leased.send({}, delay=timedelta(0))
    moved: list[int] = []
    really = delayed.dispatch_due

    def dispatch_due(*given: Any) -> delayed.Dispatched:
        moved.append(really(*given).moved)
        return delayed.Dispatched(moved[-1], 0)

    monkeypatch.setattr(delayed, "dispatch_due", dispatch_due)
    start(DISPATCH_BATCH=size)

    eventually(lambda: sum(moved) == 10)

    assert max(moved) == size


@pytest.mark.parametrize("seconds", [0.05, 60])
def test_it_looks_again_after_the_time_that_the_setting_states(start: Start, seconds: float) -> None:
    """What was stored past us (by another program, with its wake-up lost) is found by the next look, not before."""
    worker = start(DISPATCH_INTERVAL=seconds)
    eventually(lambda: worker.elector.is_leader)
    looks: list[float] = []
    really = worker.dispatch_once

    def look() -> float:
        looks.append(really())
        return looks[-1]

    worker.dispatch_once = look  # type: ignore[method-assign]
    worker.wake()
    worker.wake()
    eventually(lambda: looks)

    assert max(looks) == seconds


# -- what is kept of a message that could not be forwarded -------------------------------------------------------------


@pytest.mark.usefixtures("refusing")
@pytest.mark.parametrize("elsewhere", [False, True])
def test_its_poison_reports_where_and_why_and_the_signal_is_sent(
    start: Start, elsewhere: bool, request: pytest.FixtureRequest
) -> None:
    if elsewhere:
        request.getfixturevalue("sample")
    reported: list[Any] = []

    def receiver(sender: Any, failure: Any, verdict: Any, **_: Any) -> None:
        # The commit is before the signal: it is in the table for every connection.
        reported.append((sender, failure, verdict, PoisonMessage.objects.count()))

    poisoned.connect(receiver)
    try:
        Leased.send({}, delay=timedelta(0), correlation_id="refused", headers={"type": "order"})
        start(NUMBER_OF_RETRIES=0)
        eventually(lambda: reported)
    finally:
        poisoned.disconnect(receiver)

    lost = PoisonMessage.objects.get()
    assert lost.host
    assert lost.process
    assert lost.worker_version
    assert lost.first_failed_at is not None
    assert lost.exception_type == "django.db.utils.IntegrityError"
    sender, failure, verdict, committed = reported[0]
    assert (sender, failure.queue, failure.row.id, committed) == (Leased, Leased, lost.message_id, 1)
    assert lost.message_type == failure.message_type
    assert verdict.reason == "could not be forwarded to testapp.Leased" == lost.reason
