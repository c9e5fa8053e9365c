"""Eager mode: what is sent is handled by the process that sends it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.db import transaction
from django.test import TestCase, TransactionTestCase, override_settings

from queueapp import Queue, QueueError, consumer, inline, publish
from queueapp.conf import settings as ours
from queueapp.consuming.registry import registered
from queueapp.errors import InvalidOption
from queueapp.testing import Kit, QueueTestMixin
from tests.in_process_worker import real_commits
from tests.testapp.models import AtMostOnce, Effect, Leased, Transactional

SEMANTICS = (Leased, Transactional, AtMostOnce)


@pytest.fixture(autouse=True)
def no_consumers(no_consumers: None) -> None:
    """Only the consumers that the test registers."""


def effects() -> list[str]:
    return list(Effect.objects.order_by("pk").values_list("name", flat=True))


def note(message: dict) -> None:
    Effect.objects.create(name=message["name"])


@real_commits
@pytest.mark.parametrize("queue", SEMANTICS)
@override_settings(QUEUEAPP={"EAGER": "at_commit"})
def test_what_is_sent_is_handled_when_its_transaction_has_committed(queue: type[Queue]) -> None:
    consumer(queue)(note)
    with transaction.atomic():
        queue.send({"name": "in a transaction"})
        queue.send_many([{"name": "one of"}, {"name": "many"}])
        assert effects() == []
    assert effects() == ["in a transaction", "one of", "many"]
    queue.send({"name": "alone"})
    assert effects()[-1] == "alone"
    with transaction.atomic():
        queue.send({"name": "rolled back"})
        transaction.set_rollback(True)
    assert len(effects()) == 4


@pytest.mark.django_db
@pytest.mark.parametrize("queue", SEMANTICS)
@override_settings(QUEUEAPP={"EAGER": "at_once"})
def test_what_is_sent_is_handled_at_once_within_the_transaction(queue: type[Queue], queue_kit: Kit) -> None:
    consumer(queue)(note)
    with transaction.atomic():
        queue.send({"name": "undone"})
        assert effects() == ["undone"]
        transaction.set_rollback(True)
    assert effects() == []
    publish(queue.__name__, {"name": "published"})
    assert effects() == ["published"]
    queue_kit.assert_handled(note, times=2)


@pytest.mark.django_db
@override_settings(QUEUEAPP={"EAGER": "at_once"})
def test_what_a_handler_sends_is_handled_after_it(queue_kit: Kit) -> None:
    order = []

    @consumer(Leased)
    def first(message: dict) -> None:
        order.append("first begins")
        Transactional.send({"n": 1})
        order.append("first ends")

    @consumer(Transactional)
    def second(message: dict) -> None:
        order.append("second")

    Leased.send({})
    assert order == ["first begins", "first ends", "second"]
    queue_kit.assert_empty(Leased, Transactional)


@pytest.mark.django_db
@override_settings(QUEUEAPP={"EAGER": "at_once", "RETRY_DELAY": 60})
def test_a_failure_is_the_messages_and_not_its_senders(queue_kit: Kit) -> None:
    @consumer(Leased, attempts=2)
    def fail(message: dict) -> None:
        raise ValueError("no")

    Leased.send({})
    queue_kit.assert_retried(fail, times=1)
    queue_kit.advance(timedelta(minutes=2))
    queue_kit.assert_poisoned(fail)


@pytest.mark.django_db
@override_settings(QUEUEAPP={"EAGER": "at_once"})
def test_messages_without_a_consumer_here_wait_for_a_worker(queue_kit: Kit) -> None:
    Leased.send({"name": "x"})
    queue_kit.assert_sent(Leased, times=1)


@pytest.mark.django_db
@override_settings(QUEUEAPP={"EAGER": "at_once"})
def test_a_handler_that_sends_to_itself_for_ever_is_stopped(
    monkeypatch: pytest.MonkeyPatch, no_consumers: None
) -> None:
    monkeypatch.setattr(inline, "MAX_MESSAGES", 10)
    consumer(Leased)(lambda message: Leased.send(message) and None)
    with pytest.raises(QueueError, match="10 messages were handled for one send"):
        Leased.send({})


@pytest.mark.django_db
@override_settings(QUEUEAPP={"EAGER": "at_once"})
def test_a_process_of_workers_leaves_messages_to_them(queue_kit: Kit) -> None:
    consumer(Leased)(note)
    with inline.disabled_in_worker():
        Leased.send({"name": "x"})
    assert effects() == []
    queue_kit.assert_sent(Leased, times=1)


@pytest.mark.parametrize("wrong", ["yes", True, "AT_ONCE"])
def test_another_value_is_refused(wrong: Any) -> None:
    with override_settings(QUEUEAPP={"EAGER": wrong}), pytest.raises(InvalidOption, match="'at_commit' or 'at_once'"):
        ours.EAGER  # noqa: B018


def test_without_the_workers_app_nothing_can_be_handled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inline, "engine", None)
    with pytest.raises(QueueError, match=r"queueapp\.workers"):
        inline.handle_next(Leased, "default")


class ATestCase(QueueTestMixin, TestCase):
    """What Django's own runner makes of it."""

    def setUp(self) -> None:
        super().setUp()
        self.enterContext(registered.isolated())
        consumer(Transactional)(note)

    def test_messages_are_handled_in_the_tests_transaction(self) -> None:
        with self.captureOnCommitCallbacks(execute=True):
            Transactional.send({"name": "one"})
        self.queues.drain()
        self.queues.assert_handled(note, times=1)
        assert effects() == ["one"]

    @override_settings(QUEUEAPP={"EAGER": "at_commit"})
    def test_what_happens_at_commit_happens_when_the_callbacks_are_executed(self) -> None:
        with self.captureOnCommitCallbacks(execute=True):
            Transactional.send({"name": "one"})
            assert effects() == []
        assert effects() == ["one"]

    async def test_async_tests_are_served_as_well(self) -> None:
        await Transactional.asend({"name": "one"})
        assert len(await self.queues.adrain()) == 1
        await self.queues.aadvance(timedelta(seconds=1))
        assert await self.queues.aprocess_next(Transactional) is None
        assert await Effect.objects.acount() == 1


class ATransactionTestCase(QueueTestMixin, TransactionTestCase):
    available_apps = ["queueapp", "tests.testapp"]

    def test_messages_are_handled_with_real_commits(self) -> None:
        Leased.send({"name": "one"}, isolated=True)
        with registered.isolated():
            consumer(Leased)(note)
            assert len(self.queues.drain(Leased)) == 1


def test_a_closed_kit_records_nothing() -> None:
    kit = Kit()
    assert kit.outcomes.append in inline.observers
    kit.close()
    kit.close()
    assert kit.outcomes.append not in inline.observers
