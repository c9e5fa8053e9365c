"""A store is opened wherever it is used, before the first use and once, for the semantics that a queue has."""

from __future__ import annotations

import os
import threading
import uuid
from datetime import timedelta
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import OperationalError, connections, transaction
from django.test import Client

from queueapp import delayed
from queueapp.errors import SemanticsRefused
from queueapp.models.delivery import Semantics
from queueapp.registry import queues
from queueapp.services.delayed_dispatcher import DelayedDispatcher
from queueapp.testing import reset_caches
from tests.in_process_worker import DEADLINE, eventually, real_commits
from tests.queueapp.delayed.stores import SampleStore
from tests.testapp.models import AtMostOnce, Leased, Transactional

pytestmark = real_commits
HOUR = timedelta(hours=1)
Sample = type[SampleStore]


def modes(sample: Sample) -> list[Semantics]:
    return [connection[2] for connection in sample.opened if connection[0] == "initialize"]


def test_a_store_like_the_specs_sample_works_from_a_view(sample: Sample, settings: Any, client: Client) -> None:
    settings.MIDDLEWARE = []
    settings.ROOT_URLCONF = "tests.queueapp.delayed.stores"

    for _ in range(2):
        assert client.get("/order").status_code == 200

    endpoint = delayed.endpoint_of("default")
    assert sample.opened == [("setup_infrastructure",), ("initialize", endpoint, Semantics.AT_LEAST_ONCE)]
    assert len(delayed.store_of("default").connection) == 2  # type: ignore[attr-defined]


@pytest.mark.parametrize("queue", [Leased, Transactional, AtMostOnce])
def test_store_gets_the_semantics_of_the_queue(sample: Sample, queue: Any) -> None:
    queue.send({}, delay=HOUR)

    assert modes(sample) == [queue.delivery.semantics]


def test_a_queue_of_stronger_semantics_has_it_asked_once_more_and_a_weaker_one_does_not(sample: Sample) -> None:
    for queue in (AtMostOnce, Leased, AtMostOnce, Transactional, Leased, Transactional):
        queue.send({}, delay=HOUR)

    assert modes(sample) == [Semantics.AT_MOST_ONCE, Semantics.AT_LEAST_ONCE, Semantics.TRANSACTIONAL]


def test_an_at_least_once_store_refuses_transactional_queues_and_no_others(sample: Sample) -> None:
    sample.refused = (Semantics.TRANSACTIONAL,)
    Leased.send({}, delay=HOUR)

    with pytest.raises(NotImplementedError, match="not for this store"):
        Transactional.send({}, delay=HOUR)

    Leased.send({}, delay=HOUR)
    assert len(delayed.store_of("default").connection) == 2  # type: ignore[attr-defined]


def test_many_threads_open_it_once(sample: Sample) -> None:
    start = threading.Barrier(8)
    inside = threading.Event()
    sample.meanwhile = staticmethod(lambda: inside.wait(0.2))  # type: ignore[assignment]
    failed: list[BaseException] = []

    def send() -> None:
        try:
            start.wait(DEADLINE)
            Leased.send({}, delay=HOUR)
        except BaseException as error:
            failed.append(error)
        finally:
            connections.close_all()

    threads = [threading.Thread(target=send) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)

    assert failed == []
    assert len(sample.opened) == 2
    assert len(delayed.store_of("default").connection) == 8  # type: ignore[attr-defined]


@pytest.mark.parametrize("verb", ["setup_infrastructure", "initialize"])
def test_after_an_attempt_that_failed_it_is_tried_again(sample: Sample, verb: str) -> None:
    sample.faults = {verb: ConnectionError("the store is away")}
    with pytest.raises(ConnectionError):
        Leased.send({}, delay=HOUR)
    sample.faults = {}

    Leased.send({}, delay=HOUR)

    assert modes(sample) == [Semantics.AT_LEAST_ONCE]
    assert sample.opened[-2:] == [
        ("setup_infrastructure",), ("initialize", delayed.endpoint_of("default"), Semantics.AT_LEAST_ONCE)
    ]  # fmt: skip


def test_what_was_set_up_in_a_transaction_is_set_up_again_after_its_rollback(sample: Sample) -> None:
    with transaction.atomic():
        Leased.send({}, delay=HOUR)
        Leased.send({}, delay=HOUR)
        assert len(sample.opened) == 2, "once per transaction"
        transaction.set_rollback(True)

    with transaction.atomic():
        Leased.send({}, delay=HOUR)
    Leased.send({}, delay=HOUR)

    assert [connection[0] for connection in sample.opened] == ["setup_infrastructure", "initialize"] * 2


def test_a_forked_child_opens_one_of_its_own(sample: Sample) -> None:
    Leased.send({}, delay=HOUR)
    first = delayed.store_of("default")
    connections.close_all()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            sample.opened = []
            delayed.open_store("default", Semantics.AT_LEAST_ONCE)
            reported = f"{len(sample.opened)} {delayed.store_of('default') is first}"
        except BaseException as error:
            reported = repr(error)
        os.write(writing, reported.encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading) as pipe:
        assert pipe.read() == "2 False"
    assert delayed.store_of("default") is first


def test_the_dispatcher_opens_it_for_the_strongest_of_its_queues(sample: Sample) -> None:
    assert delayed.open_for_dispatch("default")[1] is Semantics.TRANSACTIONAL
    reset_caches()
    sample.opened = []
    with queues.isolated(Leased):
        assert delayed.open_for_dispatch("default")[1] is Semantics.AT_LEAST_ONCE

    assert modes(sample) == [Semantics.AT_LEAST_ONCE]


def test_a_dispatcher_serves_a_store_that_refuses_the_strongest(sample: Sample, settings: Any) -> None:
    settings.QUEUEAPP |= {"DISPATCH_INTERVAL": 0.05}
    sample.refused = (Semantics.TRANSACTIONAL,)
    Leased.send({"a": 1}, delay=timedelta(0))
    dispatcher = DelayedDispatcher("default", uuid.uuid4())
    dispatcher.start()
    try:
        eventually(Leased.objects.exists)
    finally:
        assert dispatcher.stop(DEADLINE)
    assert Leased.objects.get().body == b'{"a":1}'


@pytest.mark.parametrize("error", [NotImplementedError("no"), ValueError("no")])
def test_a_refusal_is_asked_for_once_and_the_store_is_set_up_once(
    sample: Sample, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    asked: list[Semantics] = []

    def initialize(self: Any, endpoint: str, semantics: Semantics) -> None:
        asked.append(semantics)
        if semantics is Semantics.TRANSACTIONAL:
            raise error
        self.connection = self.table

    monkeypatch.setattr(sample, "initialize", initialize)
    for _ in range(3):
        assert delayed.open_for_dispatch("default")[1] is Semantics.AT_LEAST_ONCE
        with pytest.raises(SemanticsRefused, match=r"DELAYED_STORE = '.*' is not accepted: .* TRANSACTIONAL .*: no"):
            Transactional.send({}, delay=HOUR)

    assert asked == [Semantics.TRANSACTIONAL, Semantics.AT_LEAST_ONCE]
    assert sample.opened == [("setup_infrastructure",)]


@pytest.mark.parametrize("refuses", ["initialize", "setup_infrastructure"])
def test_a_store_that_refuses_every_queue_is_logged_once_and_feeds_no_breaker(
    sample: Sample, settings: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, refuses: str
) -> None:
    settings.QUEUEAPP |= {"DISPATCH_INTERVAL": 0.05}
    if refuses == "initialize":
        sample.refused = tuple(Semantics)
    else:
        sample.faults = {refuses: ImproperlyConfigured("its address is missing in the settings")}
    rounds: list[int] = []
    dispatcher = DelayedDispatcher("default", uuid.uuid4())
    count = dispatcher.next_due_in
    monkeypatch.setattr(dispatcher, "next_due_in", lambda: rounds.append(1) or count())
    dispatcher.start()
    try:
        eventually(lambda: len(rounds) > 3)
    finally:
        assert dispatcher.stop(DEADLINE)

    assert len(modes(sample)) <= len(Semantics)
    assert dispatcher.fetch_breaker.report() is None
    assert caplog.text.count("Delayed messages in 'default' cannot be sent or dispatched") == 1


def test_a_store_that_is_away_is_not_asked_for_less(sample: Sample) -> None:
    sample.faults = {"initialize": OperationalError("away")}

    with pytest.raises(OperationalError):
        delayed.open_for_dispatch("default")


# -- the order of sending and removing -------------------------------------------------------------------------------


def test_an_at_least_once_store_loses_nothing_when_the_send_is_committed_and_the_removal_fails(sample: Sample) -> None:
    Leased.send({}, delay=timedelta(0))
    store = delayed.store_of("default")
    sample.faults = {"remove": ConnectionError("gone")}
    refused: list[BaseException] = []
    later = store.next()
    assert later is not None

    with pytest.raises(delayed.RecoveryFailed):
        delayed.dispatch_next(store, later + HOUR, refused.append, Semantics.AT_LEAST_ONCE)

    assert Leased.objects.count() == 1, "it is there, and will be there twice"
    assert [type(item) for item in refused] == [ConnectionError]
