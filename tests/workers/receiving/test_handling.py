"""Which consumer takes a message, and how often."""

from __future__ import annotations

from typing import Any

import pytest

from queueapp import Context, Discard, RetryNow, consumer
from queueapp.models import PoisonMessage
from tests.in_process_worker import real_commits
from tests.testapp.messages import Nop
from tests.testapp.models import Leased
from tests.workers.receiving.batches import SingleReceiver

pytestmark = [real_commits, pytest.mark.usefixtures("no_consumers")]


@pytest.mark.parametrize(
    ("options", "attempts"), [({}, 4), ({"attempts": 3}, 3)], ids=["as often as it says", "bounded where asked for"]
)
def test_a_policy_of_its_own_may_want_more_attempts_than_the_project_has(
    settings: Any, options: dict[str, Any], attempts: int
) -> None:
    settings.QUEUEAPP = {"ATTEMPTS": 2}
    seen: list[int] = []

    def act(message: Nop, context: Context) -> None:
        seen.append(context.attempt)
        raise ValueError

    def policy(failure: Any) -> Any:
        return RetryNow() if failure.attempt < 4 else Discard("enough")

    consumer(Leased, name="tests", policy=policy, **options)(act)
    Leased.send(Nop(0, ""))
    one = SingleReceiver(Leased)
    while one.receive(1):
        pass

    assert seen == list(range(1, attempts + 1))
    assert PoisonMessage.objects.exists() == (attempts == 3)


def test_max_deliveries_of_the_queue_bound_every_consumer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Leased.delivery, "max_deliveries", 2)
    seen: list[int] = []

    def act(message: Nop, context: Context) -> None:
        seen.append(context.attempt)
        raise ValueError

    consumer(Leased, name="tests", policy=lambda failure: RetryNow())(act)
    Leased.send(Nop(0, ""))
    one = SingleReceiver(Leased)
    while one.receive(1):
        pass

    assert seen == [1, 2]
    assert PoisonMessage.objects.exists()
