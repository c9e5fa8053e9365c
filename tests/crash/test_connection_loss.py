"""A connection that is killed at each statement of a receive: claim, handler, ack, commit, recoverability.

One worker with one receive task per queue serves all of these tests. Each holds the worker back at the statement in
question with a lock of its own, kills the worker's backend there, and lets go.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from queueapp.models import PoisonMessage
from queueapp.operating import control
from tests.testapp.models import Leased, Transactional

from .rig.processes import Tree
from .rig.scene import Scene
from .rig.waiting import wait_until


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
def holding(scene: Scene, sql: str, *parameters: object) -> Iterator[psycopg.Connection[Any]]:
    """A transaction of the harness that has run ``sql`` and holds its locks."""
    with scene.server.connect(scene.name) as connection, connection.transaction():
        connection.execute(sql, parameters)  # type: ignore[arg-type]
        yield connection


def kill_backend_waiting_in(scene: Scene, statement: str) -> None:
    """Kill the worker's backend once it waits for a lock in a statement that starts like this."""
    where = "application_name = 'tree1' AND wait_event_type = 'Lock' AND query LIKE %s"
    wait_until(lambda: scene.server.terminate(where, statement + "%"), f"a worker waits in {statement}", pause=0.01)


@pytest.mark.parametrize(("queue", "statement"), [(Leased, "UPDATE"), (Transactional, "DELETE")])
def test_killed_in_the_claim_the_message_is_received_a_moment_later(
    scene: Scene, tree: Tree, queue: Any, statement: str
) -> None:
    key, table = f"claim {queue.__name__}", queue._meta.db_table
    control.pause(queue)
    wait_until(lambda: f"{queue._meta.label} is paused" in tree.log_text(), "the worker knows")
    scene.send(queue, key)
    with holding(scene, f"LOCK TABLE {table} IN SHARE ROW EXCLUSIVE MODE"):
        control.resume(queue)
        kill_backend_waiting_in(scene, f'{statement}%"{table}"')

    wait_until(lambda: scene.effects(key) == 1, "the effect")
    assert scene.starts(key) == [1]


@pytest.mark.parametrize("queue", [Leased, Transactional])
def test_killed_in_a_statement_of_the_handler_the_attempt_is_counted_and_repeated(scene: Scene, queue: Any) -> None:
    key = f"handler {queue.__name__}"
    scene.send(queue, key, query_ms=1500)
    where = "application_name = 'tree1' AND query LIKE %s AND state = 'active'"
    wait_until(lambda: scene.server.terminate(where, "%pg_sleep%"), "the handler sleeps in the database")

    wait_until(lambda: scene.effects(key) == 1, "the effect")
    assert scene.starts(key) == [1, 2]


def test_killed_in_the_ack_the_ack_is_repeated_and_the_handler_is_not(scene: Scene) -> None:
    scene.send(Leased, "ack", sleep_ms=1500)
    wait_until(lambda: scene.starts("ack"), "the handler runs")
    with holding(scene, "SELECT FROM testapp_leased FOR UPDATE"):
        kill_backend_waiting_in(scene, 'DELETE FROM "testapp_leased"')

    wait_until(lambda: not Leased.objects.exists(), "it is acked")
    assert scene.effects("ack") == 1
    assert scene.starts("ack") == [1]


def test_killed_in_the_commit_everything_is_rolled_back_and_done_once_more(scene: Scene) -> None:
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
    with holding(scene, "SELECT FROM testapp_leased FOR UPDATE"):
        kill_backend_waiting_in(scene, "SELECT%FOR UPDATE")

    wait_until(lambda: scene.effects("recoverability") == 1, "the effect")
    assert scene.starts("recoverability") == [1, 2]


def test_killed_while_a_failed_transaction_is_recorded_the_attempt_is_counted_once(scene: Scene) -> None:
    scene.send(Transactional, "recoverability t", sleep_ms=1500, fail=1)
    wait_until(lambda: scene.starts("recoverability t"), "the handler runs")
    # Waits for the handler's transaction, and has the table the moment that is rolled back.
    with holding(scene, "LOCK TABLE testapp_transactional IN EXCLUSIVE MODE"):
        kill_backend_waiting_in(scene, "%FOR UPDATE")

    wait_until(lambda: scene.effects("recoverability t") == 1, "the effect")
    assert scene.starts("recoverability t") == [1, 2]
