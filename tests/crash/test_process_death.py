"""Processes that die with messages in flight: by their own handler, by the OOM killer, with their whole tree."""

from __future__ import annotations

from datetime import timedelta

import psutil

from queueapp.models import PoisonMessage, Subscriber
from tests.testapp.models import AtMostOnce, Leased, Transactional

from .rig.scene import Scene
from .rig.servers import on_both
from .rig.waiting import PATIENCE_SECONDS, wait_until


def poison_of(message_id: object) -> PoisonMessage | None:
    return PoisonMessage.objects.filter(message_id=message_id).first()


@on_both
def test_a_handler_that_kills_its_process_ends_as_poison_and_other_messages_go_on(scene: Scene) -> None:
    attempts, processes = 3, 2
    # A rolled back message may be taken by another process before its supervisor has counted: see ``crashes``.
    pills = {
        "exits": (scene.send(Transactional, "exits", die="exit"), attempts + processes - 1),
        "segfaults": (scene.send(Leased, "segfaults", die="SIGSEGV"), attempts),
    }
    good = [f"good {number}" for number in range(20)]
    for number, key in enumerate(good):
        scene.send((Leased, Transactional)[number % 2], key)

    scene.workers("testapp.Leased", "testapp.Transactional", f"--processes={processes}")

    wait_until(lambda: PoisonMessage.objects.count() == len(pills), "the pills are poison")
    verdict = scene.drained()
    assert verdict.faultless, verdict
    assert all(scene.effects(key) >= 1 for key in good)
    for key, (message_id, pill) in pills.items():
        poison = poison_of(message_id)
        assert poison is not None
        assert poison.attempts == attempts
        assert "ProcessDied" in poison.exception_type
        # One fewer is possible: a process may die of one pill in the instant in which it was given the other.
        assert attempts - 1 <= len(scene.starts(key)) <= pill


@on_both
def test_a_handler_that_kills_its_whole_tree_ends_as_poison_and_its_neighbours_do_not(scene: Scene) -> None:
    pills = [scene.send(queue, f"{queue.__name__} pill", die="tree") for queue in (Transactional, Leased)]
    good = [f"good {number}" for number in range(60)]
    for number, key in enumerate(good):
        scene.send((Leased, Transactional)[number % 2], key)

    # Another tree runs maintenance; the tree's own dispatcher would have to wait for its predecessor's term to end.
    scene.program("keeper", "manage.py", "rundelayeddispatcher").keep_running()
    tree = scene.tree(
        "testapp.Leased",
        "testapp.Transactional",
        "--no-dispatcher",
        "--no-maintenance",
        environ={"CRASH_ATTEMPTS": "2"},
    )
    wait_until(
        lambda: "maintenance" in str(scene.execute("SELECT role FROM queueapp_leader")),
        "a leader of maintenance is elected",
    )
    tree.keep_running()

    wait_until(lambda: PoisonMessage.objects.count() >= len(pills), "the pills are poison", seconds=120)
    verdict = scene.drained()
    assert verdict.faultless, verdict
    assert {poison.message_id for poison in PoisonMessage.objects.all()} == set(pills)
    assert all(scene.effects(key) >= 1 for key in good)
    # Two hand-outs more than attempts, and of TRANSACTIONAL one more in the first life of the tree, of which no row
    # tells.
    assert all(len(scene.starts(f"{queue.__name__} pill")) <= 5 for queue in (Transactional, Leased))
    assert 2 <= tree.restarts <= 10


@on_both
def test_an_at_most_once_message_that_died_with_its_process_is_reported_with_id_and_headers(scene: Scene) -> None:
    pill = AtMostOnce.send(_act("poison_pill", die="SIGKILL"), headers={"trace": "t-4711"})
    tree = scene.workers("testapp.AtMostOnce", "--no-dispatcher", "--no-maintenance")

    wait_until(lambda: "message is lost" in tree.log_text(), "the loss is reported")
    report = next(line for line in tree.log_text().splitlines() if "message is lost" in line)
    assert str(pill) in report
    assert "t-4711" in report
    assert "SIGKILL" in report
    assert AtMostOnce.objects.count() == 0  # gone by contract, never handled twice
    assert scene.starts("poison_pill") == [1]


@on_both
def test_a_message_in_flight_at_each_crash_of_a_poison_pill_is_not_kept_as_poison_with_it(scene: Scene) -> None:
    """Both are slow, so whenever a process dies of the one it has the other in flight as well."""
    pills = [
        scene.send(queue, f"pill of {queue.__name__}", die="SIGKILL", die_after_ms=400)
        for queue in (Leased, Transactional)
    ]
    for queue in (Leased, Transactional):
        scene.send(queue, f"neighbour of {queue.__name__}", sleep_ms=1500)
    scene.workers("testapp.Leased", "testapp.Transactional", "--concurrency=2")

    # The process may die between the effect of the leased one and its ack: then that has two.
    neighbours = [f"neighbour of {queue.__name__}" for queue in (Leased, Transactional)]
    wait_until(lambda: all(scene.effects(key) for key in neighbours), "the neighbours have their effects")
    verdict = scene.drained()
    assert verdict.faultless, verdict
    assert {poison.message_id for poison in PoisonMessage.objects.all()} == set(pills)


@on_both
def test_what_a_killed_worker_had_in_flight_is_counted_and_the_rest_of_its_batch_is_not(scene: Scene) -> None:
    for number in range(40):  # quick ones first, so that the batches grow
        scene.send(Leased, f"quick {number}")
    scene.send(Leased, "in flight", sleep_ms=120_000)
    rest = [f"rest {number}" for number in range(10)]
    for key in rest:
        scene.send(Leased, key)
    tree = scene.workers("testapp.Leased", "--concurrency=1")
    wait_until(lambda: scene.starts("in flight"), "the handler runs")
    # Behind a slow handler, what was handled before it is acked, and what was not started is given back.
    wait_until(lambda: Leased.objects.filter(lease_token=None).count() == len(rest), "the rest is given back")
    wait_until(lambda: Leased.objects.count() == 1 + len(rest), "the quick ones are acked")

    scene.rewrite(Leased, b"120000", b"0")  # quick the next time
    tree.worker().kill()

    verdict = scene.drained()
    assert verdict.faultless, verdict
    assert scene.starts("in flight") == [1, 2]
    assert [scene.starts(key)[0] for key in rest] == [1] * len(rest), "no attempt was counted"


@on_both
def test_children_of_a_killed_supervisor_finish_what_they_have_and_end(scene: Scene) -> None:
    tree = scene.workers("testapp.Leased", "testapp.Transactional")
    scene.send(Leased, "leased", sleep_ms=1000)
    scene.send(Transactional, "transactional", sleep_ms=1000)
    wait_until(lambda: scene.starts("leased") and scene.starts("transactional"), "both are in flight")

    orphans = tree.children()
    psutil.Process(tree.pid).kill()
    psutil.wait_procs(orphans, timeout=PATIENCE_SECONDS)

    assert not any(orphan.is_running() for orphan in orphans)
    scene.send(Leased, "for the next life")
    verdict = scene.drained()
    assert verdict.faultless, verdict
    assert verdict.effects == 3
    assert verdict.duplicates["at_least_once"] == 0
    assert tree.restarts == 1


@on_both
def test_a_killed_dispatcher_is_replaced_and_every_delayed_message_arrives_once(scene: Scene) -> None:
    tree = scene.workers("testapp.Transactional")
    keys = [f"delayed {number}" for number in range(200)]
    for number, key in enumerate(keys):
        scene.send(Transactional, key, delay=timedelta(milliseconds=10 * number))
    for _ in range(2):
        dispatcher = wait_until(lambda: tree.children("dispatcher"), "a dispatcher")[0]
        wait_until(lambda: "delayed dispatcher" in str(scene.execute("SELECT role FROM queueapp_leader")), "a leader")
        dispatcher.kill()
        psutil.wait_procs([dispatcher], timeout=PATIENCE_SECONDS)

    verdict = scene.drained()
    assert verdict.faultless, verdict
    assert verdict.effects == len(keys)


@on_both
def test_leases_of_a_dead_subscriber_are_released_by_its_missing_heartbeat(scene: Scene) -> None:
    """Sooner than by their own end: here the lease would last for an hour more."""
    survivor = scene.workers("testapp.Transactional")  # runs maintenance, does not receive the queue
    victim = scene.tree("testapp.Leased", "--no-dispatcher", "--no-maintenance")
    victim.start()
    scene.send(Leased, "orphaned", sleep_ms=120_000)
    wait_until(lambda: scene.starts("orphaned"), "the handler runs")
    victim.kill_tree()
    Leased.objects.update(lease_expires="2100-01-01T00:00:00Z")

    wait_until(lambda: Leased.objects.filter(lease_token=None).exists(), "the lease is released")
    wait_until(lambda: "; released 1 lease." in survivor.log_text(), "that is logged")
    wait_until(lambda: not Subscriber.objects.filter(queue="testapp.Leased").exists(), "the subscriber is buried")


def _act(key: str, **behaviour: object) -> object:
    from .workload.messages import Act

    return Act(key, **behaviour)  # type: ignore[arg-type]
