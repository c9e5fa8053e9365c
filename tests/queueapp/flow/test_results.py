"""``keep_result`` and ``result_of``: what a handler returned, or why its message became poison."""

from __future__ import annotations

import asyncio
import threading
import uuid
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.db import connections, transaction

from queueapp import (
    BatchContext,
    Chain,
    Context,
    Group,
    InvalidMessage,
    MessageNotFound,
    aresult_of,
    consumer,
    message_type,
    rehearse,
    result_of,
)
from queueapp.failures import poison_operations
from queueapp.flow import results
from queueapp.models import MessageResult, Now, PoisonMessage
from queueapp.operations import control
from queueapp.sending.isolation import in_another_thread
from tests.databases import only_on_postgresql, parametrize_alias
from tests.in_process_worker import Worker, eventually, real_commits
from tests.testapp.messages import Ping
from tests.testapp.models import (
    Followed,
    FollowedTogether,
    FollowedTransactional,
    Leased,
    Secret,
    SecretTransactional,
)

pytestmark = [real_commits, pytest.mark.usefixtures("no_consumers")]
DAY = timedelta(days=1)
QUEUES = pytest.mark.parametrize(
    "queue", [Followed, FollowedTransactional, FollowedTogether], ids=lambda queue: queue.__name__
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One case per database."""
    parametrize_alias(metafunc, real_commits.kwargs["available_apps"])


@message_type("results.Ask")
class Ask(msgspec.Struct):
    """Its handler returns something that depends on the name."""

    name: str


class Answer(msgspec.Struct):
    text: str


def answer(message: Ask, context: Context) -> Any:
    if message.name == "again" and context.attempt == 1:
        return object()
    if message.name == "object":
        return object()
    if message.name == "raises":
        raise ZeroDivisionError("by hand")
    return {"text": Answer(message.name), "bytes": b"\xff", "nothing": None}.get(message.name, Answer("again"))


async def answer_later(message: Ask) -> Any:
    return Answer("later")


@QUEUES
def test_a_result_is_the_value_or_the_error(alias: str, queue: Any) -> None:
    consumer(queue, name="results.answer", attempts=2, retry_delay=0)(answer)
    names = ("text", "bytes", "nothing", "again", "object", "raises")
    ids = {name: queue.send(Ask(name), keep_result=DAY, using=alias) for name in names}
    plain = queue.send(Ask("text"), using=alias)
    worker = Worker(queue, alias)
    worker.start()
    try:
        eventually(lambda: not queue.objects.using(alias).exists())
    finally:
        worker.stop()
    found = {name: result_of(identity, using=alias) for name, identity in ids.items()}

    assert [found[name].value for name in names[:4]] == [{"text": "text"}, b"\xff", None, {"text": "again"}]
    assert found["text"].decode(Answer) == Answer("text")
    assert [found[name].attempts for name in names] == [1, 1, 1, 2, 2, 2]
    assert all(row.error == "" for row in list(found.values())[:4])
    assert "results.answer returned cannot be kept as a result. A object cannot be" in found["object"].error
    assert found["raises"].error.endswith("ZeroDivisionError: by hand")
    first = found["text"]
    assert first.started_at <= first.finished_at
    assert first.expires_at - first.finished_at == DAY
    with pytest.raises(MessageNotFound, match="keep_result"):
        result_of(plain, using=alias)
    assert not results._returned

    mended = PoisonMessage.objects.using(alias).get(message_id=ids["raises"])
    mended.body = b'{"name": "text"}'
    mended.save()
    poison_operations.requeue(PoisonMessage.objects.using(alias).filter(pk=mended.pk))
    worker = Worker(queue, alias)
    worker.start()
    try:
        eventually(lambda: not result_of(ids["raises"], using=alias).error)
    finally:
        worker.stop()
    assert result_of(ids["raises"], using=alias).value == {"text": "text"}


@QUEUES
def test_what_an_operator_moves_to_poison_has_the_reason_as_its_result(alias: str, queue: Any) -> None:
    kept = queue.send(Ask("text"), keep_result=DAY, using=alias)
    queue.send(Ask("text"), using=alias)
    seqs = list(queue.objects.using(alias).values_list("seq", flat=True))

    assert control.move_to_poison(queue, seqs, reason="by hand", using=alias) == 2
    assert result_of(kept, using=alias).error == "by hand"
    assert MessageResult.objects.using(alias).count() == 1


def test_async_handlers_batches_chains_and_clients(alias: str) -> None:
    consumer(Followed, name="results.later")(answer_later)

    @consumer(FollowedTransactional, name="results.many", batch=5)
    def many(messages: list[Ask], context: BatchContext) -> None:
        pass

    ids = Chain(
        [
            Followed.prepare(Ask("x"), keep_result=DAY, using=alias),
            FollowedTransactional.prepare(Ask("y"), keep_result=DAY, using=alias),
        ]
    ).send()
    workers = [Worker(queue, alias).start() for queue in (Followed, FollowedTransactional)]
    try:
        found = [result_of(identity, timeout=timedelta(seconds=30), using=alias) for identity in ids]
    finally:
        for worker in workers:
            worker.stop()
    assert [(row.value, row.attempts) for row in found] == [({"text": "later"}, 1), (None, None)]

    with Group(using=alias) as group:
        identity = group.send(FollowedTogether, Ping(), keep_result=DAY)
    with FollowedTogether.receive(using=alias) as batch:
        batch[0].ack()
    assert (result_of(identity, using=alias).value, group.is_complete) == (None, True)


def test_it_is_written_with_the_ack_and_with_nothing_else(alias: str) -> None:
    identity = Followed.send(Ping(), keep_result=DAY, using=alias)
    with Followed.receive(using=alias) as batch, transaction.atomic(using=alias):
        batch[0].ack()
        assert result_of(identity, using=alias).error == ""
        transaction.set_rollback(True, using=alias)
    assert not MessageResult.objects.using(alias).exists()


def test_a_wait_in_a_transaction_sees_what_others_commit(alias: str) -> None:
    identity = uuid.uuid4()

    def write() -> None:
        try:
            results._write(alias, identity, 60, {"queue": "x", "attempts": 1})
        finally:
            connections[alias].close()

    with transaction.atomic(using=alias):
        with connections[alias].cursor() as cursor:
            cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        assert not MessageResult.objects.using(alias).exists()  # takes the snapshot
        with pytest.raises(MessageNotFound, match=r"after 0:00:00\.001"):
            result_of(identity, timeout=timedelta(milliseconds=1), using=alias)
        thread = threading.Thread(target=write)
        thread.start()
        assert result_of(identity, timeout=timedelta(seconds=30), using=alias).attempts == 1
        assert not MessageResult.objects.using(alias).exists()
        thread.join()


def test_a_transaction_with_one_snapshot_sees_a_result_that_came_later(alias: str) -> None:
    identity = uuid.uuid4()
    with transaction.atomic(using=alias):
        with connections[alias].cursor() as cursor:
            cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        assert not MessageResult.objects.using(alias).exists()  # takes the snapshot
        in_another_thread(alias, lambda: results._write(alias, identity, 60, {"queue": "x", "attempts": 1}))
        assert result_of(identity, using=alias).attempts == 1
        assert async_to_sync(aresult_of)(identity, using=alias).attempts == 1


def test_async_code_waits_without_holding_its_loop_up(alias: str) -> None:
    identity = uuid.uuid4()

    async def write_while_waiting() -> MessageResult:
        task = asyncio.create_task(aresult_of(identity, timeout=timedelta(seconds=30), using=alias))
        await sync_to_async(results._write)(alias, identity, 60, {"queue": "x", "attempts": 1})
        found = await task
        assert (await aresult_of(identity, using=alias)).pk == found.pk
        await sync_to_async(connections.close_all)()
        return found

    assert asyncio.run(write_while_waiting()).attempts == 1


def test_a_task_that_is_cancelled_waits_no_longer(alias: str) -> None:
    async def cancel_it() -> None:
        task = asyncio.create_task(aresult_of(uuid.uuid4(), timeout=timedelta(hours=1), using=alias))
        while not any(thread.name.startswith("asyncio_") for thread in threading.enumerate()):
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(MessageNotFound):
            await aresult_of(uuid.uuid4(), using=alias)
        await sync_to_async(connections.close_all)()

    asyncio.run(cancel_it())  # which waits for the threads of its loop


@pytest.mark.parametrize("option", [{"then": None}, {"keep_result": DAY}], ids=str)
def test_many_messages_have_no_follow_up_and_no_result(option: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="is an argument of one message"):
        Followed.send_many([{"n": 1}], **option)


def test_maintenance_deletes_what_is_over(alias: str) -> None:
    ids = [uuid.uuid4(), uuid.uuid4()]
    for identity in ids:
        results._write(alias, identity, 60, {"queue": "x"})
    MessageResult.objects.using(alias).filter(pk=ids[0]).update(expires_at=Now() - timedelta(seconds=1))
    with pytest.raises(MessageNotFound):
        result_of(ids[0], using=alias)

    results.run_maintenance(alias, lambda: True)

    assert list(MessageResult.objects.using(alias).values_list("pk", flat=True)) == ids[1:]


def test_an_encrypted_queue_encrypts_its_results(alias: str, settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.QUEUEAPP = {"KEYRING": lambda: {"only": bytes(range(32))}}
    monkeypatch.setattr(Followed.delivery, "encoding", ("encrypted",))
    consumer(Followed, name="results.answer")(answer)
    identity = Followed.send(Ask("text"), keep_result=DAY, using=alias)
    worker = Worker(Followed, alias)
    worker.start()
    try:
        result = eventually(lambda: MessageResult.objects.using(alias).filter(pk=identity).first())
    finally:
        worker.stop()
    assert b"text" not in bytes(result.body)
    assert result.value == {"text": "text"}


def test_refusals(alias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidMessage, match=r"workflow = True"):
        Leased.send(Ping(), keep_result=DAY, using=alias)
    with pytest.raises(InvalidMessage, match="keep_result"):
        Followed.send(Ping(), keep_result=60, using=alias)  # type: ignore[arg-type]
    with pytest.raises(InvalidMessage, match="keep_result"):
        Followed.send(Ping(), keep_result=timedelta(milliseconds=1), using=alias)
    monkeypatch.setattr(Secret.delivery, "workflow", True)
    with pytest.raises(InvalidMessage, match="each copy"):
        Secret.send(Ping(), keep_result=DAY, using=alias)
    assert SecretTransactional.delivery.workflow is False


@only_on_postgresql
def test_two_messages_with_one_id_are_acked_at_once(alias: str) -> None:
    """As those that follow the copies of one message."""
    identity, errors = uuid.uuid4(), list[BaseException]()
    for number in range(2):
        Followed.send({"n": number}, message_id=identity, keep_result=DAY, using=alias)

    def ack() -> None:
        try:
            with Followed.receive(using=alias) as batch:
                batch[0].ack()
        except BaseException as error:
            errors.append(error)
        finally:
            connections.close_all()

    def waits() -> bool:
        with connections[alias].cursor() as cursor:
            cursor.execute("SELECT count(*) FROM pg_locks WHERE NOT granted")
            return bool(cursor.fetchone()[0])

    acking = threading.Thread(target=ack)
    with Followed.receive(using=alias) as batch, transaction.atomic(using=alias):
        batch[0].ack()
        acking.start()
        eventually(waits)
    acking.join()

    assert errors == []
    assert not Followed.objects.using(alias).exists()
    assert result_of(identity, using=alias).error == ""


def test_what_a_rehearsed_handler_returns_is_no_result(alias: str) -> None:
    consumer(Followed, name="returns")(lambda message: "rehearsed")
    identity = Followed.send({"n": 1}, keep_result=DAY, using=alias)
    assert rehearse(Followed.objects.using(alias).get()).succeeded

    with Followed.receive(using=alias) as batch:
        batch[0].ack()

    assert result_of(identity, using=alias).value is None
