"""Workers that get a stop request: from a deploy, from an operator, while handlers run."""

from __future__ import annotations

import contextlib
import itertools
import signal
import threading
from collections.abc import Iterator
from time import monotonic

from django.db import connections

from tests.testapp.models import Leased, Transactional

from .rig.processes import Tree
from .rig.scene import Scene
from .rig.servers import on_both
from .rig.waiting import wait_until


@contextlib.contextmanager
def under_load(scene: Scene) -> Iterator[None]:
    """Meanwhile some hundred messages are always waiting."""
    enough = threading.Event()

    def produce() -> None:
        numbers = itertools.count()
        while not enough.wait(0.02):
            if Leased.objects.count() < 300:
                for _ in range(100):
                    scene.send(Leased, f"load {next(numbers)}", sleep_ms=1)
        connections.close_all()

    producer = threading.Thread(target=produce)
    producer.start()
    try:
        yield
    finally:
        enough.set()
        producer.join()


def worked(scene: Scene, tree: Tree) -> int:
    """How many effects this tree has made."""
    return int(scene.execute("SELECT count(*) FROM crash_effect WHERE worker = %s", tree.name)[0][0])


@on_both
def test_a_rolling_restart_under_load_handles_every_leased_message_exactly_once(scene: Scene) -> None:
    with under_load(scene):
        old = scene.workers("testapp.Leased", "--no-dispatcher", "--no-maintenance")
        wait_until(lambda: worked(scene, old) > 50, "the old workers are at work")
        new = scene.workers("testapp.Leased", "--no-dispatcher", "--no-maintenance")
        wait_until(lambda: worked(scene, new) > 50, "the new workers are at work")
        assert old.stop() == 0
        so_far = worked(scene, new)
        wait_until(lambda: worked(scene, new) > so_far + 50, "the new workers go on alone")

    verdict = scene.drained()
    assert new.stop() == 0
    assert verdict.faultless, verdict
    assert verdict.effects == verdict.sent
    assert verdict.duplicates["at_least_once"] == 0
    assert "leases were lost" not in old.log_text() + new.log_text()


@on_both
def test_a_stopping_worker_gives_back_what_it_has_not_started_uncounted(scene: Scene) -> None:
    for number in range(60):  # quick ones first, so that the batches grow
        scene.send(Leased, f"quick {number}")
    scene.send(Leased, "slow", sleep_ms=1500)
    rest = [f"rest {number}" for number in range(300)]
    for key in rest:
        scene.send(Leased, key, sleep_ms=20)
    tree = scene.workers("testapp.Leased", "--no-dispatcher", "--no-maintenance", "--concurrency=1")
    wait_until(lambda: scene.starts("slow"), "the slow handler runs", pause=0.01)

    assert tree.stop() == 0

    assert scene.effects("slow") == 1  # it had its time to finish
    remaining = list(Leased.objects.values_list("lease_token", "deliveries", "cancels"))
    assert len(remaining) >= 250
    assert set(remaining) == {(None, 0, 0)}
    assert not scene.execute("SELECT 1 FROM queueapp_subscriber")  # it deregistered


@on_both
def test_a_second_sigterm_does_not_wait_for_the_handlers(scene: Scene) -> None:
    scene.send(Leased, "leased", sleep_ms=60_000)
    scene.send(Transactional, "transactional", sleep_ms=60_000)
    tree = scene.workers(
        "testapp.Leased", "testapp.Transactional", "--no-dispatcher", "--no-maintenance", shutdown_grace=50
    )
    wait_until(lambda: scene.starts("leased") and scene.starts("transactional"), "both handlers run")
    child = tree.worker()

    began = monotonic()
    tree.signal(signal.SIGTERM)
    wait_until(lambda: "stopping" in str(child.status()) or monotonic() - began > 1, "the first signal is seen")
    assert tree.running, "the first SIGTERM waits for the handlers"
    code = tree.stop(seconds=40)  # the second one

    assert monotonic() - began < 30
    assert code != 0  # it says that handlers were cut off
    assert not child.is_running()
    assert scene.effects() == 0
    # Both were cut off and are counted; they wait for the next worker.
    assert scene.waiting() == 2
    assert set(Leased.objects.values_list("lease_token", "deliveries")) <= {(None, 1)}
    assert set(Transactional.objects.values_list("deliveries", flat=True)) <= {1}
