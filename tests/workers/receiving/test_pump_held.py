"""A message that another session holds in a savepoint: looks see it, and no claim gets it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise
from time import monotonic
from typing import Any

import pytest
from django.db import connections, transaction

from queueapp import consumer
from tests.in_process_worker import DEADLINE, Worker, eventually, real_commits
from tests.testapp.messages import Nop
from tests.testapp.models import Leased, Transactional
from workers.receiving.pump import COVERING, EMPTY_WAIT, QueuePump

pytestmark = [real_commits, pytest.mark.usefixtures("no_consumers")]

#: So many claims in vain in a row are waited for.
IN_VAIN = COVERING + 5


def send_elsewhere(queue: Any, number: int) -> None:
    """On a connection of its own: the one of the test has a transaction open."""

    def send() -> None:
        queue.send(Nop(number, ""))
        connections.close_all()

    sender = threading.Thread(target=send)
    sender.start()
    sender.join(DEADLINE)


@pytest.mark.parametrize(("queue", "released"), [(Leased, False), (Transactional, True)])
def test_it_is_claimed_in_vain_ever_less_often_and_what_is_new_is_handled_at_once(
    start_worker: Callable[..., Worker],
    settings: Any,
    monkeypatch: pytest.MonkeyPatch,
    queue: Any,
    released: bool,
) -> None:
    """What was locked in a savepoint is no less so when the savepoint is released."""
    settings.QUEUEAPP = {"PEEK_DELAY": 2}
    handled: list[int] = []
    looks: list[tuple[float, int]] = []
    really_look = QueuePump.peek_and_submit

    def look(self: QueuePump) -> None:
        looks.append((monotonic(), self.schedule.empty_claims))
        really_look(self)

    monkeypatch.setattr(QueuePump, "peek_and_submit", look)
    consumer(queue, name="tests")(_noting(handled))
    queue.send(Nop(0, ""))
    with transaction.atomic(), ExitStack() as savepoint:
        savepoint.enter_context(transaction.atomic())
        list(queue.objects.select_for_update())
        if released:
            savepoint.close()
        pump = start_worker(queue, concurrency=1).pump
        send_elsewhere(queue, 1)  # a later transaction has ended: from now on a look takes the row for free
        pump.wake()

        eventually(lambda: pump.schedule.empty_claims >= IN_VAIN)
        for (before, in_vain), (after, more) in pairwise(looks):
            if COVERING < in_vain <= more:
                assert after - before >= EMPTY_WAIT * 2**in_vain / 2, looks

        for number in range(2, 12):
            send_elsewhere(queue, number)
            pump.wake()
            eventually(lambda: handled == [*range(1, number + 1)])  # noqa: B023
    pump.wake()
    eventually(lambda: handled[-1] == 0)


def _noting(handled: list[int]) -> Callable[[Nop], None]:
    def handler(message: Nop) -> None:
        handled.append(message.number)

    return handler
