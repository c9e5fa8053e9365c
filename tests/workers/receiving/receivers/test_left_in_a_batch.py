"""What a handler leaves behind in the middle of a batch, where the connection was handed out on trust: those before it left it
untouched. It is noticed as from the first message, and the next one finds everything as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from django.db import DatabaseError, connection, connections, transaction

from queueapp import Context, consumer
from queueapp.consuming.registry import registered
from queueapp.models import PoisonMessage
from tests.in_process_worker import real_commits
from tests.testapp.models import AtMostOnce, Effect, Leased
from tests.workers.receiving.batches import SingleReceiver

pytestmark = real_commits

MESSAGES = 4

#: What a handler may forget, and the frames of which nobody may let go meanwhile.
kept: list[Any] = []


class Note(msgspec.Struct):
    number: int


def run(sql: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(sql)


def closes() -> None:
    connection.close()


def closes_and_opens_another() -> None:
    connection.close()
    connection.connect()


def takes_the_session_away() -> None:
    kept.append(connection.connection)
    connection.connection = None


def puts_another_in_its_place() -> None:
    connections["default"] = connections["default"].copy()


def removes_it() -> None:
    del connections["default"]


def turns_autocommit_off() -> None:
    transaction.set_autocommit(False)


def says_that_autocommit_is_off() -> None:
    connection.autocommit = False


def enters_and_never_leaves() -> None:
    transaction.atomic().__enter__()


def asks_for_a_rollback() -> None:
    connection.needs_rollback = True


def leaves_a_hook() -> None:
    connection.run_on_commit.append((set(), lambda: None, False))


def leaves_a_savepoint() -> None:
    connection.savepoint_ids.append("s1")


def begins_by_itself() -> None:
    run("BEGIN")


def begins_with_the_driver() -> None:
    connection.connection.execute("BEGIN")


def fails_with_the_driver() -> None:
    begins_with_the_driver()
    with contextlib.suppress(Exception):
        connection.connection.execute("SELECT * FROM no_such_table")


def turns_the_drivers_autocommit_off() -> None:
    connection.connection.autocommit = False


def leaves_a_pipeline() -> None:
    kept.append(connection.connection.pipeline())
    kept[-1].__enter__()


def leaves_a_block_of_the_driver() -> None:
    kept.append(connection.connection.transaction())
    kept[-1].__enter__()


def leaves_another_alias_in_a_block() -> None:
    connections["another"] = connections["default"].copy()
    transaction.atomic(using="another").__enter__()


RUDE = [
    closes, closes_and_opens_another, takes_the_session_away, puts_another_in_its_place, removes_it, turns_autocommit_off,
    says_that_autocommit_is_off, enters_and_never_leaves, asks_for_a_rollback, leaves_a_hook, leaves_a_savepoint,
    begins_by_itself, begins_with_the_driver, fails_with_the_driver, turns_the_drivers_autocommit_off, leaves_a_pipeline,
    leaves_a_block_of_the_driver, leaves_another_alias_in_a_block,
]  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    if connection.vendor != "postgresql":
        pytest.skip("of the driver of PostgreSQL")
    monkeypatch.setattr(registered, "_by_queue", {})
    kept.clear()


def receive(queue: Any, act: Callable[[Note], None]) -> list[tuple[int, Any]]:
    """A batch of all messages; returns what each handler met: its number, and the state of an open session.

    A task that has had its time, on a busy machine, gives back what it has not begun; that comes with the next batch.
    """
    met: list[tuple[int, Any]] = []

    def handler(message: Note, context: Context) -> None:
        raw = connection.connection
        met.append((message.number, None if raw is None else (raw.autocommit, raw.pgconn.transaction_status)))
        assert (connection.in_atomic_block, connection.needs_rollback, connection.run_on_commit) == (False, False, [])
        act(message)

    consumer(queue, name="batch", attempts=1)(handler)
    queue.send_many(Note(number) for number in range(MESSAGES))
    receiver = SingleReceiver(queue)
    try:
        for _ in range(MESSAGES):
            with receiver.receiving(MESSAGES):
                pass
            if len(met) == MESSAGES:
                break
    finally:
        kept.clear()
    return met


@pytest.mark.parametrize("queue", [Leased, AtMostOnce])
@pytest.mark.parametrize("place", [1, 2, MESSAGES - 1])
@pytest.mark.parametrize("abuse", RUDE)
def test_what_is_left_behind_in_a_batch_is_noticed_and_mended(
    queue: Any, place: int, abuse: Callable[[], None]
) -> None:
    def act(message: Note) -> None:
        if message.number == place:
            abuse()
        elif message.number > place:
            Effect.objects.create(name="behind")

    met = receive(queue, act)

    assert [number for number, _ in met] == list(range(MESSAGES))
    assert {session for _, session in met} <= {None, (True, 0)}
    assert "LeakedState" in PoisonMessage.objects.get().exception_type
    assert Effect.objects.count() == MESSAGES - 1 - place
    assert not queue.objects.exists()


@pytest.mark.parametrize("queue", [Leased, AtMostOnce])
def test_a_session_changed_for_good_in_a_batch_is_not_the_next_messages(queue: Any) -> None:
    seen: list[str] = []

    def act(message: Note) -> None:
        if message.number == 1:
            run("SET search_path = nowhere")
        elif message.number == 2:
            seen.append(
                connection.connection is None or connection.connection.execute("SHOW search_path").fetchone()[0]
            )
            Effect.objects.create(name="behind")

    receive(queue, act)

    assert seen
    assert "nowhere" not in map(str, seen)
    assert Effect.objects.count() == 1
    assert not PoisonMessage.objects.exists()


@pytest.mark.parametrize("queue", [Leased, AtMostOnce])
def test_an_error_that_is_swallowed_in_a_batch_is_harmless_and_forgotten(queue: Any) -> None:
    """The statement was rolled back, and nothing else was open."""

    def act(message: Note) -> None:
        if message.number == 1:
            with contextlib.suppress(DatabaseError):
                run("SELECT * FROM no_such_table")
        Effect.objects.create(name=str(message.number))

    receive(queue, act)

    assert Effect.objects.count() == MESSAGES
    assert not PoisonMessage.objects.exists()


@pytest.mark.parametrize("queue", [Leased, AtMostOnce])
def test_a_session_that_was_replaced_between_two_batches_is_no_handlers_doing(queue: Any) -> None:
    handled: list[int] = []
    consumer(queue, name="batch", attempts=1)(lambda message: handled.append(message["number"]))
    queue.send_many({"number": number} for number in range(MESSAGES))
    task = SingleReceiver(queue).task
    task.bind()

    assert task.receive(2) == 2
    connection.close()
    assert task.receive(2) == 2

    assert handled == list(range(MESSAGES))
    assert not PoisonMessage.objects.exists()


def test_a_session_that_was_lost_at_an_ack_is_not_the_next_handlers_doing(monkeypatch: pytest.MonkeyPatch) -> None:
    handled: list[int] = []

    def handler(message: dict[str, int]) -> None:
        handled.append(message["number"])
        if len(handled) == 1:
            other = connection.copy()
            with other.cursor() as cursor:
                cursor.execute("SELECT pg_terminate_backend(%s)", [connection.connection.info.backend_pid])
            other.close()

    consumer(Leased, name="batch", attempts=1)(handler)
    Leased.send_many({"number": number} for number in range(MESSAGES))
    task = SingleReceiver(Leased).task
    task.bind()
    monkeypatch.setattr(task, "target", 0.0)  # it acks after each

    task.receive(MESSAGES)

    assert handled == [0, 1]
    assert not PoisonMessage.objects.exists()
