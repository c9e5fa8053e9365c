"""A rolling deploy: workers of version N and N+1 side by side on one queue."""

from __future__ import annotations

from queueapp.models import PoisonMessage
from tests.testapp.models import Leased, Transactional

from .rig.scene import Scene
from .rig.servers import on_both
from .rig.waiting import holds_for, wait_until
from .workload.messages import Act, Unheard


@on_both
def test_messages_of_a_type_that_only_the_next_version_knows_are_left_for_it(scene: Scene) -> None:
    for number in range(20):
        for queue in (Leased, Transactional):
            queue.send(Unheard(f"new {number}"))
            queue.send(Act(f"old {number}"))
    queues = ("testapp.Leased", "testapp.Transactional", "--no-dispatcher", "--no-maintenance")
    old = scene.workers(*queues)
    wait_until(lambda: scene.effects() == 40, "the old version handles what it knows")
    # It does not spin on the others, does not count attempts, and does not poison them.
    # A claim counts deliveries, and releases unknown types a moment later.
    wait_until(lambda: deliveries() == {0}, "what the old version does not know is given back")
    assert Leased.objects.count() == Transactional.objects.count() == 20
    assert not PoisonMessage.objects.exists()

    new = scene.workers(*queues, environ={"CRASH_VERSION": "2"})
    wait_until(lambda: scene.effects() == 80, "the new version handles the rest")
    wait_until(lambda: not Leased.objects.exists(), "the last ones are acked, which follows their effects")
    assert old.log_text().count("have no consumer in this process") == 2  # once per queue
    assert holds_for(lambda: scene.effects() == 80, seconds=0.5)
    assert (old.stop(), new.stop()) == (0, 0)


def deliveries() -> set[int]:
    """How often what waits was handed out."""
    return {count for queue in (Leased, Transactional) for count in queue.objects.values_list("deliveries", flat=True)}
