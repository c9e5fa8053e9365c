"""``Context.checkpoint`` and processes that are killed: work goes on where it was, and no step is done twice."""

from __future__ import annotations

from collections.abc import Callable

from queueapp.models import PoisonMessage
from tests.in_process_worker import eventually, real_commits
from tests.testapp.messages import Steps
from tests.testapp.models import Effect, Urgent
from tests.workers.trees import Tree

pytestmark = real_commits


def test_work_that_was_killed_goes_on_at_its_checkpoint(start_tree: Callable[..., Tree]) -> None:
    """Killed behind the commit of a step."""
    Urgent.send(Steps(8, die_after=[4]))
    tree = start_tree("testapp.Urgent", "--concurrency", "1", "--no-dispatcher")
    eventually(lambda: not Urgent.objects.exists(), 120)

    assert tree.terminate() == 0
    effects = list(Effect.objects.order_by("pk").values_list("name", "detail"))
    assert [name for name, _ in effects] == [f"step {step}" for step in range(8)], "each step once, in order"
    assert [detail for _, detail in effects] == ["1"] * 5 + ["2"] * 3, "the second attempt began where the first was"
    assert not PoisonMessage.objects.exists()
