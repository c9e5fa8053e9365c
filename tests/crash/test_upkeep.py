"""Two processes of two trees, or none, may dispatch delayed messages and run maintenance; each is elected for
itself."""

from __future__ import annotations

from datetime import timedelta

from queueapp.models import DISPATCHER, MAINTENANCE, Leader, Now, Subscriber
from tests.testapp.models import Leased, Transactional

from .rig.scene import Scene
from .rig.servers import on_both
from .rig.waiting import holds_for, wait_until

LABELS = (Leased._meta.label, Transactional._meta.label)


def expire(number: int) -> None:
    """Some messages that no worker will ever receive."""
    Transactional.send_many([{"number": n} for n in range(number)], expires_in=timedelta(hours=1))
    Transactional.objects.update(expires="2000-01-01T00:00:00Z")


def gone() -> bool:
    return not Transactional.objects.exists()


def roles() -> list[str]:
    """What the processes of this database are that have a row and are no workers."""
    return sorted(Subscriber.objects.filter(queue__startswith="(").values_list("queue", flat=True))


@on_both
def test_a_tree_without_a_dispatcher_runs_maintenance(scene: Scene) -> None:
    scene.send(Leased, "later", delay=timedelta(seconds=1))
    expire(3)
    tree = scene.workers(Leased._meta.label, "--no-dispatcher", purge_interval=1)

    wait_until(gone, "what had expired is deleted")
    expire(3)
    wait_until(gone, "and again")
    wait_until(lambda: roles() == [MAINTENANCE], "its pulse is seen")
    assert holds_for(lambda: not scene.starts("later"), 2), "no dispatcher runs"
    wait_until(lambda: f"{DISPATCHER} in 'default': no dispatcher is running" in tree.log_text(), "it is said")
    assert tree.log_text().count("no dispatcher is running") == 1
    assert tree.stop() == 0
    assert not roles(), "it deregistered"


@on_both
def test_a_tree_without_maintenance_dispatches(scene: Scene) -> None:
    scene.send(Leased, "later", delay=timedelta(seconds=1))
    expire(3)
    tree = scene.workers(Leased._meta.label, "--no-maintenance", "--processes", "2", purge_interval=1)

    wait_until(lambda: scene.effects("later"), "the delayed message is handled")
    wait_until(lambda: roles() == [DISPATCHER], "its pulse is seen")
    assert holds_for(lambda: not gone(), 2), "maintenance does not run"
    wait_until(
        lambda: f"{MAINTENANCE} in 'default': no maintenance is running; expired messages stay" in tree.log_text(),
        "it is said",
    )
    assert holds_for(lambda: tree.log_text().count("no maintenance is running") == 1, 2), "by one of its workers, once"

    second_program = scene.program("keeper", "manage.py", "rundelayeddispatcher")
    second_program.keep_running()
    wait_until(gone, "another process runs maintenance")
    wait_until(lambda: f"{MAINTENANCE} in 'default': one is running again" in tree.log_text(), "that is said as well")


@on_both
def test_one_tree_leads_the_dispatching_and_another_one_the_maintenance(scene: Scene) -> None:
    dispatches = scene.workers(Leased._meta.label, "--no-maintenance", purge_interval=1)
    maintains = scene.workers(Leased._meta.label, "--no-dispatcher", purge_interval=1)
    stands_by = scene.tree(Leased._meta.label, purge_interval=1)
    # The leader of maintenance keeps the journal as well, elected for itself.
    wait_until(lambda: len(scene.look("SELECT role FROM queueapp_leader")) == 3, "all are elected")
    stands_by.keep_running()
    wait_until(lambda: roles() == sorted([DISPATCHER, MAINTENANCE] * 2), "the third stands by for both")
    assert holds_for(lambda: {term for (term,) in scene.look("SELECT term FROM queueapp_leader")} == {1}, 6)

    maintains.kill()
    Leader.objects.filter(role__startswith="maintenance ").update(expires=Now())
    expire(3)
    wait_until(gone, "the third runs maintenance once the lease of the dead one is over")
    terms = {role.split()[0]: term for role, term in scene.look("SELECT role, term FROM queueapp_leader")}
    # The dead one kept the journal as well, and that lease may be over by now.
    assert terms.pop("journal") in (1, 2)
    assert terms == {"delayed": 1, "maintenance": 2}, "the dispatching has stayed where it was"
    assert dispatches.stop() == 0


@on_both
def test_a_tree_that_does_neither_has_workers_alone(scene: Scene) -> None:
    tree = scene.workers(Leased._meta.label, "--no-dispatcher", "--no-maintenance")
    scene.send(Leased, "now")
    wait_until(lambda: scene.effects("now"), "it receives")
    assert len(tree.children()) == 1
    wait_until(lambda: tree.log_text().count(" is running; ") == 2, "it says that both are missing")
