"""A network that loses a connection without an error, and a server that takes everything and answers nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from queueapp.models import PoisonMessage
from tests.testapp.models import AtMostOnce, Leased, Transactional

from .rig.processes import Tree
from .rig.proxy import CAN_LOSE_PACKETS, Proxy
from .rig.scene import Scene
from .rig.servers import on_both, only_on_sqlserver
from .rig.waiting import holds_for, wait_until

QUEUES = ("testapp.Leased", "testapp.Transactional")


@pytest.fixture
def proxy(scene: Scene) -> Iterator[Proxy]:
    with Proxy(scene.server.port, scene.server.host) as proxy:
        yield proxy


def stalled_at_work(scene: Scene, proxy: Proxy) -> Tree:
    """Workers that have handled one message when their server stops answering, and two messages that come then."""
    tree = scene.workers(*QUEUES, port=proxy.port, database_timeout=2)
    scene.send(Leased, "before")
    wait_until(lambda: scene.effects() == 1 and scene.waiting() == 0, "the worker works")
    proxy.stall()
    scene.send(Leased, "leased meanwhile")
    scene.send(Transactional, "sent meanwhile")
    return tree


@pytest.mark.skipif(not CAN_LOSE_PACKETS, reason="packets can be lost on purpose on Linux only")
def test_half_open_connections_are_found_out_by_both_ends(scene: Scene, proxy: Proxy) -> None:
    tree = scene.workers(*QUEUES, "--no-dispatcher", "--no-maintenance", port=proxy.port, database_timeout=3)
    scene.send(Transactional, "in flight", sleep_ms=2000)
    scene.send(Leased, "leased", sleep_ms=2000)
    wait_until(lambda: scene.starts("in flight") and scene.starts("leased"), "both are in flight")
    locked = scene.backends("state LIKE 'idle in transaction%%'")
    assert locked, "the message in flight is locked by a backend that will never hear of its client again"
    assert proxy.lose_packets() >= 2
    scene.send(Leased, "sent meanwhile")

    verdict = scene.drained()
    assert verdict.faultless, verdict
    assert verdict.handled == 3
    assert scene.starts("in flight") == [1, 2]
    assert not scene.backends("pid = %s", locked[0][0]), "the server has ended it"
    assert tree.restarts == 0, "lost connections cost no process"


def test_a_server_that_acknowledges_and_never_answers_is_given_up(scene: Scene, proxy: Proxy) -> None:
    """No keepalive sees this one: every byte is acknowledged. So it is behind a load balancer whose server died."""
    tree = stalled_at_work(scene, proxy)
    wait_until(lambda: "has not answered for 2 s" in tree.log_text(), "the worker gives its connections up")
    for breaker in ("Peek", "Heartbeat", "Fetch of due messages"):
        wait_until(lambda it=breaker: f"{it} " in tree.log_text(), f"{breaker} fails")  # type: ignore[misc]
    assert scene.effects() == 1
    proxy.resume()

    verdict = scene.drained()
    assert verdict.faultless, verdict
    assert verdict.handled == 3
    assert tree.restarts == 0
    assert tree.stop() == 0


def test_a_commit_whose_answer_is_lost_is_neither_repeated_nor_counted_as_a_failure(scene: Scene, proxy: Proxy) -> None:
    tree = scene.workers(*QUEUES, "--concurrency=1", port=proxy.port, database_timeout=2)
    for number in range(6):  # so that all statements are prepared: that takes an answer
        scene.send((Leased, Transactional)[number % 2], f"before {number}")
    wait_until(lambda: scene.effects() == 6 and scene.waiting() == 0, "the worker works")
    scene.send(Transactional, "committed", linger_ms=1500)
    scene.send(Leased, "acked", linger_ms=1500)
    wait_until(lambda: scene.effects("acked") == 1, "one is before its ack")
    wait_until(
        lambda: scene.backends("state = 'idle in transaction' AND query LIKE '%%crash_effect%%'"),
        "one in front of its commit",
    )
    # From now on everything reaches the server, and nothing comes back.
    proxy.stall(to_server=False, to_client=True)
    wait_until(lambda: scene.effects("committed") == 1, "the commit has reached the server")
    wait_until(lambda: not Leased.objects.exists(), "the ack has reached the server")
    wait_until(lambda: tree.log_text().count("has not answered for 2 s") >= 3, "the worker gives its connections up")
    proxy.resume()

    verdict = scene.drained()
    assert verdict.faultless, verdict  # each has its effect, and is not in the poison table as well
    assert verdict.duplicates["at_least_once"] == 0
    assert scene.starts("committed") == [1]
    assert scene.starts("acked") == [1]
    assert verdict.poisoned == 0


def test_what_was_kept_by_a_commit_whose_answer_is_lost_is_not_kept_twice(scene: Scene, proxy: Proxy) -> None:
    """An AT_MOST_ONCE message is in no table when its handler fails: the process that keeps it has to know whether it
    has."""
    scene.execute(
        "CREATE FUNCTION slow_commit() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(1.5); RETURN "
        "NULL; END $$"
    )
    scene.execute(
        "CREATE CONSTRAINT TRIGGER slow_commit AFTER INSERT ON queueapp_poisonmessage DEFERRABLE INITIALLY DEFERRED "
        "FOR EACH ROW EXECUTE FUNCTION slow_commit()"
    )
    scene.workers("testapp.AtMostOnce", "--concurrency=1", port=proxy.port)
    scene.send(AtMostOnce, "fails", fail=1)
    wait_until(lambda: scene.backends("query = 'COMMIT' AND wait_event = 'PgSleep'"), "it is being kept", pause=0.01)
    proxy.stall(to_server=False, to_client=True)
    wait_until(PoisonMessage.objects.exists, "the commit has reached the server")
    proxy.cut()
    proxy.resume()
    scene.send(AtMostOnce, "after it")

    wait_until(lambda: scene.effects("after it") == 1, "the worker has gone on")
    verdict = scene.drained()
    assert verdict.faultless, verdict
    assert PoisonMessage.objects.count() == 1
    assert scene.starts("fails") == [1]


@on_both
def test_reset_connections_cost_nothing_but_the_attempt(scene: Scene, proxy: Proxy) -> None:
    tree = scene.workers(*QUEUES, port=proxy.port)
    for number in range(100):
        scene.send((Leased, Transactional)[number % 2], f"message {number}", sleep_ms=5)
    for enough in (10, 40, 70):
        wait_until(lambda least=enough: scene.effects() >= least, "the worker works", pause=0.01)  # type: ignore[misc]
        proxy.cut()

    verdict = scene.drained()
    assert verdict.faultless, verdict
    assert verdict.poisoned == 0
    assert tree.restarts == 0


@only_on_sqlserver
def test_sessions_that_are_killed_cost_nothing_but_the_attempt(scene: Scene) -> None:
    """`KILL`, as an operator or a failover does it; on PostgreSQL ``test_connection_loss`` does it at each
    statement."""
    tree = scene.workers(*QUEUES)
    for number in range(100):
        scene.send((Leased, Transactional)[number % 2], f"message {number}", sleep_ms=5)
    for enough in (10, 40, 70):
        wait_until(lambda least=enough: scene.effects() >= least, "the worker works", pause=0.01)  # type: ignore[misc]
        assert scene.terminate_workers()

    verdict = scene.drained()
    assert verdict.faultless, verdict
    assert verdict.poisoned == 0
    assert tree.restarts == 0


@only_on_sqlserver
def test_a_server_that_answers_nothing_for_a_while_loses_and_doubles_nothing(scene: Scene, proxy: Proxy) -> None:
    """The same on PostgreSQL, and when it is given up, is tested above."""
    tree = stalled_at_work(scene, proxy)
    assert holds_for(lambda: scene.effects() == 1, 5), "nothing passes"
    proxy.resume()

    verdict = scene.drained()
    assert verdict.faultless, verdict
    assert tree.restarts == 0
    assert tree.stop() == 0
