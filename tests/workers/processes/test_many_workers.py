"""Many worker processes on small backlogs share them: few receives go in vain, and everybody gets something."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.inprocess import eventually
from tests.testapp.messages import Nop
from tests.testapp.models import Leased, Transactional
from tests.workers.trees import Tree

FORKED = ("-m", "tests.workers.forked")


@pytest.mark.parametrize("queue", [Leased, Transactional])
def test_eight_workers_receive_in_vain_less_than_every_twentieth_time(
    start_tree: Callable[..., Tree], queue: type[Leased]
) -> None:
    tree = start_tree("8", queue._meta.label, command=FORKED)
    tree.wait_for_workers(8)
    tree.wait_until_workers_know_each_other()
    sent = 0
    for burst in range(30):
        sent += queue.send_many(Nop(number, "") for number in range(5 + burst))
        eventually(lambda: not queue.objects.exists())

    assert tree.terminate() == 0

    assert sum(tree.numbers("handled")) == sent
    assert min(tree.numbers("handled")) > 0, "nobody took everything"
    assert sum(tree.numbers("empty receives")) < 0.05 * sent
