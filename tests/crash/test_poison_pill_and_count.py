"""A TRANSACTIONAL message that kills its worker is free again before its death is counted: how often it runs all
the same."""

from __future__ import annotations

import signal

import psutil

from queueapp.models import PoisonMessage
from tests.testapp.models import Transactional

from .rig.processes import Tree
from .rig.scene import Scene
from .rig.waiting import wait_until

KEY = "poison_pill"
COUNTING = f"wait_event_type = 'Lock' AND query LIKE '%%{Transactional._meta.db_table}%%FOR UPDATE%%'"


def holder(scene: Scene, starts: int) -> psutil.Process:
    """The process in which its handler was started so often."""
    wait_until(lambda: len(scene.starts(KEY)) == starts, f"it is started {starts} times")
    *_, last = scene.starts_file.read_text().splitlines()
    return psutil.Process(int(last.split()[-2]))


def kill_before_it_is_counted(scene: Scene, tree: Tree, starts: int) -> psutil.Process:
    """Kill the process that has it while the supervisor stands still; the other process, which has it then."""
    wait_until(lambda: len(tree.children("worker")) == 2, "all processes are there")
    victim = holder(scene, starts)
    tree.signal(signal.SIGSTOP)
    victim.kill()
    survivor = holder(scene, starts + 1)
    tree.signal(signal.SIGCONT)
    return survivor


def test_a_process_is_replaced_when_its_death_is_counted_so_a_poison_pill_runs_once_more_for_each_other_process(
    scene: Scene,
) -> None:
    attempts, processes = 3, 2
    scene.send(Transactional, KEY, sleep_ms=3_600_000)
    tree = scene.workers("testapp.Transactional", f"--processes={processes}", "--concurrency=1")

    for starts in (1, 3):
        survivor = kill_before_it_is_counted(scene, tree, starts)
        # No claim waits for a lock: it is who counts the death, and the other process has the message.
        wait_until(lambda: scene.backends(COUNTING), "the supervisor waits for the message")
        assert [child.pid for child in tree.children("worker")] == [survivor.pid], "one is replaced that is not counted"
        survivor.kill()

    poison = wait_until(PoisonMessage.objects.first, "it is poison")
    assert scene.drained().faultless
    assert poison.attempts == attempts
    assert scene.starts(KEY) == [1, 1, 3, 3]
    assert len(scene.starts(KEY)) == attempts + processes - 1
    assert tree.restarts == 0
