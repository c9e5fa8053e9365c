"""What each semantics promises when processes and sessions are killed, on the database of this run, of whichever kind
it is.

The crash suite (``tests/crash``) injects more faults, at chosen moments, with a PostgreSQL of its own.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection

from queueapp import Semantics
from queueapp.models import PoisonMessage
from tests.in_process_worker import eventually, real_commits
from tests.kill_session import kill, kill_all_others, session_of
from tests.testapp.messages import DEADLY, Many, Ping
from tests.testapp.models import AtMostOnce, Effect, Leased, Several, SeveralTransactional, Together, Transactional
from tests.workers.trees import Tree

pytestmark = real_commits
Start = Callable[..., Tree]

each_queue = pytest.mark.parametrize("queue", [Transactional, Leased, AtMostOnce], ids=lambda queue: queue.__name__)
LONG = 240.0


def send(queue: Any, count: int, sleep_ms: int = 20) -> list[str]:
    names = [f"{queue.__name__} {n}" for n in range(count)]
    queue.send_many(Ping(name, sleep_ms=sleep_ms) for name in names)
    return names


def effects() -> Counter[str]:
    return Counter(Effect.objects.values_list("name", flat=True))


def kept(queue: Any, names: list[str]) -> bool:
    """Whether the promise is kept: exactly one effect, at least one, at most one; and nothing else has become of
    them."""
    done = effects()
    assert set(done) <= set(names)
    if queue.delivery.semantics is Semantics.AT_MOST_ONCE:
        # A handler whose session is killed has failed, and is not run again: its message is kept as poison.
        return max(done.values()) == 1
    assert not PoisonMessage.objects.exists()
    if queue.delivery.semantics is Semantics.TRANSACTIONAL:
        return done == Counter(names)
    return set(done) == set(names)


@each_queue
def test_workers_that_are_killed_while_they_handle_keep_the_promise(start_tree: Start, queue: Any) -> None:
    names = send(queue, 40)
    tree = start_tree(queue._meta.label)
    tree.wait_for_workers()
    for done in (5,):
        eventually(lambda done=done: len(effects()) >= done, LONG)
        for worker in tree.workers:
            os.kill(worker, signal.SIGKILL)
        eventually(lambda: tree.workers, LONG)

    eventually(lambda: not queue.objects.exists(), LONG)
    tree.terminate()

    assert kept(queue, names)


@each_queue
def test_sessions_that_are_killed_while_they_handle_keep_the_promise(start_tree: Start, queue: Any) -> None:
    names = send(queue, 40)
    tree = start_tree(queue._meta.label)
    tree.wait_for_workers()
    for done in (5, 15):
        eventually(lambda done=done: len(effects()) >= done or not queue.objects.exists(), LONG)
        kill_all_others(connection)

    eventually(lambda: not queue.objects.exists(), LONG)
    tree.terminate()

    assert kept(queue, names)


def test_who_kills_a_transaction_of_several_is_counted_alone(start_tree: Start) -> None:
    innocent = [f"{n}" for n in range(30)]
    Together.send_many([*map(Ping, innocent[:15]), Ping("pill", die=True), *map(Ping, innocent[15:])])
    tree = start_tree("testapp.Together", "--concurrency", "1")

    poison = eventually(PoisonMessage.objects.first, LONG)
    eventually(lambda: not Together.objects.exists(), LONG)

    assert tree.terminate() == 0
    assert (poison.attempts, bytes(poison.body).count(b'"pill"'), PoisonMessage.objects.count()) == (3, 1, 1)
    assert effects() == Counter(innocent)
    assert {*Effect.objects.values_list("detail", flat=True)} == {"together.act#1"}, "counted against no other message"


@pytest.mark.parametrize("queue", [Several, SeveralTransactional], ids=lambda queue: queue.__name__)
def test_poison_pill_of_a_batch_call_is_found_and_no_other_message_is_counted(start_tree: Start, queue: Any) -> None:
    innocent = [f"{n}" for n in range(15)]
    queue.send_many([*map(Many, innocent[:7]), Many("pill", die=True), *map(Many, innocent[7:])])
    tree = start_tree(queue._meta.label, "--concurrency", "1")

    poison = eventually(PoisonMessage.objects.first, LONG)
    eventually(lambda: not queue.objects.exists(), LONG)

    assert tree.terminate() == 0
    assert (poison.attempts, bytes(poison.body).count(b'"pill"'), PoisonMessage.objects.count()) == (3, 1, 1)
    assert set(effects()) == set(innocent)
    assert queue is Several or max(effects().values()) == 1


@pytest.mark.parametrize(
    ("queue", "kind"),
    [(Transactional, Ping), (Leased, Ping), (Together, Ping), (Several, Many), (SeveralTransactional, Many)],
    ids=lambda item: item.__name__,
)
def test_a_message_that_kills_the_process_that_decodes_it_is_poison_as_if_its_handler_had_done_so(
    start_tree: Start, queue: Any, kind: Any
) -> None:
    """A codec or a class of the project may do that; such crashes were not counted, and had no end."""
    innocent = [f"{n}" for n in range(6)]
    queue.send_many([*map(kind, innocent[:3]), kind(DEADLY), *map(kind, innocent[3:])])
    tree = start_tree(queue._meta.label, "--concurrency", "2")

    poison = eventually(PoisonMessage.objects.first, LONG)
    eventually(lambda: not queue.objects.exists(), LONG)

    assert tree.terminate() == 0, tree.output
    assert PoisonMessage.objects.count() == 1
    assert (poison.attempts, bytes(poison.body).count(DEADLY.encode())) == (3, 1)
    assert set(effects()) == set(innocent)
    assert tree.output.count("was killed by SIGKILL; restarting") == 3


def test_an_at_most_once_message_that_kills_the_process_that_decodes_it_is_named(start_tree: Start) -> None:
    message = AtMostOnce.send(Ping(DEADLY))
    seq = AtMostOnce.objects.get().seq
    tree = start_tree("testapp.AtMostOnce")

    eventually(lambda: f"at-most-once message is lost: seq {seq}, id {message}" in tree.output, LONG)

    assert tree.terminate() == 0, tree.output


def test_a_session_that_was_killed_is_gone_on_either_database(transactional_db: None) -> None:
    second_connection = connection.copy()
    try:
        session = session_of(second_connection)
        kill(connection, session)
        with pytest.raises(Exception, match=r"."):
            eventually(lambda: session_of(second_connection) != session)
    finally:
        second_connection.close()
