"""What the receiver of a set consumer records in its slot: all messages of the set, and none when it has ended."""

from __future__ import annotations

from queueapp import MessageSet, set_consumer
from tests.in_process_worker import real_commits
from tests.testapp.messages import Nop
from tests.testapp.models import InSets
from tests.workers.receiving.single_receiver import SingleReceiver
from workers.processes.shared_memory import InFlightSlots

pytestmark = real_commits


def test_a_process_that_dies_has_the_whole_set_in_flight(no_consumers: None) -> None:
    slots = InFlightSlots(1)
    seen: list[tuple[int, ...]] = []

    @set_consumer(InSets, name="sets")
    def look(messages: MessageSet) -> None:
        (in_flight,) = slots.in_flight()
        seen.append(in_flight.batch)

    InSets.send_many(Nop(number, "") for number in range(5))
    seqs = tuple(InSets.objects.order_by("seq").values_list("seq", flat=True))
    receiver = SingleReceiver(InSets)
    receiver.task.slot = slots.slot(0)
    assert receiver.receive(100) == 5

    assert seen == [seqs]
    assert not list(slots.in_flight())
    slots.close()
