"""A migrator that ends at any point: what it leaves behind, and who goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from queueapp.contrib.celery.broker_migration import Broker, Migrator, migrator
from queueapp.contrib.celery.models import CompletedMove, PendingMove

from .conftest import Shop, move

At = Callable[..., Broker]
Open = Callable[[str], Shop]


class Died(Exception):
    """In the place of a SIGKILL."""


#: (which end, the step) behind which a migrator dies.
STEPS = [("source", "take_out"), ("target", "put"), ("source", "confirm"), ("target", "forget")]


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrator, "BATCH", 3)


def dies_behind(migrator: Migrator, end: str, step: str) -> None:
    broker: Any = getattr(migrator, end)
    original = getattr(broker, step)

    def last(*arguments: Any) -> Any:
        original(*arguments)
        raise Died

    setattr(broker, step, last)


@pytest.mark.parametrize(("end", "step"), STEPS)
@pytest.mark.parametrize("direction", ["from redis", "to redis"])
def test_it_goes_on_where_it_was(
    alias: str, at: At, shop: Open, redis_url: str, ours_url: str, direction: str, end: str, step: str
) -> None:
    source, target = (redis_url, ours_url) if direction == "from redis" else (ours_url, redis_url)
    there, here = shop(source), shop(target)
    for number in range(8):
        there.publish("mail", number, priority=0)

    for _ in range(3):
        migrator = Migrator(at(source), at(target))
        dies_behind(migrator, end, step)
        with pytest.raises(Died), migrator.exclusive(30):
            migrator.run(None, follow=False, report_progress=lambda: None)
    move(at(source), at(target))

    assert here.numbers("mail") == list(range(8))
    assert there.numbers("mail") == []
    assert not PendingMove.objects.using(alias).exists()


@pytest.mark.parametrize(("end", "step"), STEPS[:3])
@pytest.mark.parametrize("direction", ["from redis", "to redis"])
def test_it_can_be_given_up(
    alias: str, at: At, shop: Open, redis_url: str, ours_url: str, direction: str, end: str, step: str
) -> None:
    source, target = (redis_url, ours_url) if direction == "from redis" else (ours_url, redis_url)
    there, here = shop(source), shop(target)
    for number in range(8):
        there.publish("mail", number, priority=0)
    migrator = Migrator(at(source), at(target))
    dies_behind(migrator, end, step)
    with pytest.raises(Died), migrator.exclusive(30):
        migrator.run(None, follow=False, report_progress=lambda: None)

    again = Migrator(at(source), at(target))
    with again.exclusive(30):
        count = again.put_back(None)

    arrived = 0 if step == "take_out" else 3
    assert count == 3 - arrived
    assert here.numbers("mail") == list(range(arrived))
    assert sorted(there.numbers("mail")) == list(range(arrived, 8))
    assert not CompletedMove.objects.using(alias).exists() or step == "confirm"
    assert not PendingMove.objects.using(alias).exists()


def test_one_at_a_time(alias: str, at: At, redis_url: str, ours_url: str) -> None:
    first, second = Migrator(at(redis_url), at(ours_url)), Migrator(at(ours_url), at(redis_url))
    with (
        first.exclusive(0),
        pytest.raises(migrator.MoveRefused, match="only one may run at a time"),
        second.exclusive(0),
    ):
        pass
    with second.exclusive(0):
        pass
