"""A connection that is killed at each statement of a receive: claim, handler, ack, commit, recoverability.

One worker with one receive task per queue serves all of these tests. Each holds the worker back at the statement in
question with a lock of its own, kills the worker's session there, and releases it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from queueapp.models import PoisonMessage
from queueapp.operations import control
from tests.testapp.models import Leased, Transactional

from .rig.processes import Tree
from .rig.scene import Scene
from .rig.servers import shared_on_both
from .rig.standstill import WORDS, Words
from .rig.waiting import wait_until

pytestmark = shared_on_both


def words(scene: Scene) -> Words:
    return WORDS[scene.server.vendor]


@pytest.fixture(scope="module")
def tree(shared_scene: Scene) -> Tree:
    return shared_scene.workers("testapp.Leased", "testapp.Transactional", "--concurrency=1")


@pytest.fixture
def scene(shared_scene: Scene, tree: Tree) -> Iterator[Scene]:
    yield shared_scene
    verdict = shared_scene.drained()
    assert verdict.faultless, verdict
    assert not PoisonMessage.objects.exists()
    assert tree.restarts == 0, "a lost connection costs no process"


@contextlib.contextmanager
def holding(scene: Scene, sql: str) -> Iterator[None]:
    """A transaction of the harness that has run ``sql`` and holds its locks."""
    with scene.server.connect(scene.name) as connection, connection.transaction():
        connection.execute(sql)
        yield


def kill_session_waiting_in(scene: Scene, statement: str) -> None:
    """Kill the worker's session once it waits for a lock in a statement like this."""
    kill(scene, "wait_event_type = 'Lock'", "LCK[_]M[_]%", statement)


def kill_sleeping_session(scene: Scene) -> None:
    """Kill the worker's session once it sleeps in the database."""
    kill(scene, "state = 'active'", "WAITFOR", words(scene).sleeping)


def kill(scene: Scene, where: str, wait: str, statement: str) -> None:
    server = scene.server

    def killed() -> int:
        if server.vendor == "postgresql":
            where_exactly = f"application_name = 'tree1' AND {where} AND query LIKE %s"
            return int(server.terminate(where_exactly, statement))
        return int(server.end_sessions(scene.name, server.waiting(scene.name, wait, statement)))

    wait_until(killed, f"a worker waits in {statement}", pause=0.01)


@pytest.mark.parametrize("queue", [Leased, Transactional])
def test_killed_in_the_claim_the_message_is_received_a_moment_later(scene: Scene, tree: Tree, queue: Any) -> None:
    key, table = f"claim {queue.__name__}", queue._meta.db_table
    control.pause(queue)
    wait_until(lambda: f"{queue._meta.label} is paused" in tree.log_text(), "the worker knows")
    scene.send(queue, key)
    with holding(scene, words(scene).from_writing.format(table)):
        control.resume(queue)
        kill_session_waiting_in(scene, words(scene).claims[table].format(table))

    wait_until(lambda: scene.effects(key) == 1, "the effect")
    assert scene.starts(key) == [1]


@pytest.mark.parametrize("queue", [Leased, Transactional])
def test_killed_in_a_statement_of_the_handler_the_attempt_is_counted_and_repeated(scene: Scene, queue: Any) -> None:
    key = f"handler {queue.__name__}"
    scene.send(queue, key, query_ms=1500)
    kill_sleeping_session(scene)

    wait_until(lambda: scene.effects(key) == 1, "the effect")
    assert scene.starts(key) == [1, 2]


def test_killed_in_the_ack_the_ack_is_repeated_and_the_handler_is_not(scene: Scene) -> None:
    scene.send(Leased, "ack", sleep_ms=1500)
    wait_until(lambda: scene.starts("ack"), "the handler runs")
    with holding(scene, words(scene).rows.format("testapp_leased")):
        kill_session_waiting_in(scene, words(scene).acking.format("testapp_leased"))

    wait_until(lambda: not Leased.objects.exists(), "it is acked")
    assert scene.effects("ack") == 1
    assert scene.starts("ack") == [1]


def test_killed_in_the_commit_everything_is_rolled_back_and_done_once_more(scene: Scene) -> None:
    if scene.server.vendor != "postgresql":
        pytest.skip("a commit that waits needs a deferred trigger, which is PostgreSQL's")
    scene.execute(
        "CREATE FUNCTION slow_commit() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "IF NEW.key = 'commit' AND NEW.attempt = 1 THEN PERFORM pg_sleep(60); END IF; RETURN NULL; END $$"
    )
    scene.execute(
        "CREATE CONSTRAINT TRIGGER slow_commit AFTER INSERT ON crash_effect DEFERRABLE INITIALLY DEFERRED "
        "FOR EACH ROW EXECUTE FUNCTION slow_commit()"
    )
    scene.send(Transactional, "commit", send_key="sent in the commit", send_to="testapp.Leased")
    where = "application_name = 'tree1' AND query = 'COMMIT' AND state = 'active'"
    wait_until(lambda: scene.server.terminate(where), "the worker commits")

    wait_until(lambda: scene.effects("commit") == 1, "the effect")
    assert scene.starts("commit") == [1, 2]
    wait_until(lambda: scene.effects("sent in the commit") == 1, "what was sent in the same transaction")


def test_killed_while_a_failed_lease_is_recorded_the_attempt_is_counted_once(scene: Scene) -> None:
    scene.send(Leased, "recoverability", sleep_ms=1500, fail=1)
    wait_until(lambda: scene.starts("recoverability"), "the handler runs")
    with holding(scene, words(scene).rows.format("testapp_leased")):
        kill_session_waiting_in(scene, words(scene).recording["testapp_leased"].format("testapp_leased"))

    wait_until(lambda: scene.effects("recoverability") == 1, "the effect")
    assert scene.starts("recoverability") == [1, 2]


def test_killed_while_a_failed_transaction_is_recorded_the_attempt_is_counted_once(scene: Scene) -> None:
    scene.send(Transactional, "recoverability t", sleep_ms=1500, fail=1)
    wait_until(lambda: scene.starts("recoverability t"), "the handler runs")
    # Waits for the handler's transaction, and has the table the moment that is rolled back.
    with holding(scene, words(scene).table.format("testapp_transactional")):
        kill_session_waiting_in(scene, words(scene).recording["testapp_transactional"].format("testapp_transactional"))

    wait_until(lambda: scene.effects("recoverability t") == 1, "the effect")
    assert scene.starts("recoverability t") == [1, 2]
