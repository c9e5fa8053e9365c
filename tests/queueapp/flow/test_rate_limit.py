"""``Delivery.rate``: a bucket of tokens in the database, for all processes together."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
from django.db import connections, transaction
from django.db.models import F

from queueapp import InvalidOption, Queue
from queueapp.flow.rate_limit import RateLimit, rate_limit_of
from queueapp.models import TokenBucket
from queueapp.models.delivery.options import per_second
from tests.databases import parametrize_alias
from tests.in_process_worker import real_commits
from tests.testapp.models import Leased, RatedTransactional


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One case per database."""
    parametrize_alias(metafunc, real_commits.kwargs["available_apps"])


@pytest.fixture
def limit(alias: str, delivery: Any) -> Any:
    """Makes the limit of a process on ``Leased``."""

    def make(rate: str, burst: int | None = None) -> RateLimit:
        delivery(Leased, rate=rate, rate_burst=burst)
        return RateLimit(Leased, alias)

    return make


def let_pass(alias: str, **span: float) -> None:
    """So much time has passed for the bucket."""
    TokenBucket.objects.using(alias).update(filled_at=F("filled_at") - timedelta(**span))


@pytest.mark.parametrize(
    ("rate", "expected"), [("40/s", 40.0), ("90/m", 1.5), ("0.5 / s", 0.5), ("36/h", 0.01), ("86400/d", 1.0)]
)
def test_rates(rate: str, expected: float) -> None:
    assert per_second(rate) == pytest.approx(expected)


@pytest.mark.parametrize("rate", ["", "5", "5/", "/s", "5/w", "0/s", "-1/s", "many/s", "1e9/s", "nan/s", "inf/s", 5])
def test_what_is_no_rate_is_refused(rate: Any) -> None:
    with pytest.raises(InvalidOption, match="rate"):
        type("Refused", (Queue,), {"__module__": __name__, "Delivery": type("Delivery", (), {"rate": rate}),
                                   "Meta": type("Meta", (), {"abstract": True})})  # fmt: skip


def test_a_burst_then_the_rate(limit: Any, alias: str) -> None:
    first, second = limit("6/m", 5), limit("6/m", 5)

    assert first.take(3) == 3
    assert second.take(100) == 2
    assert (first.take(1), second.take(1)) == (0, 0)
    assert 5 < first.wait <= 10

    first, second = limit("6/m", 5), limit("6/m", 5)
    let_pass(alias, seconds=21)
    assert first.take(9) == 2
    assert second.take(9) == 0
    let_pass(alias, days=9)
    assert limit("6/m", 5).take(99) == 5


def test_what_is_not_used_is_given_back(limit: Any, alias: str) -> None:
    item = limit("6/h", 5)
    assert item.take(5) == 5

    item.give_back(4)

    assert item.wait == 0
    assert limit("6/h", 5).take(9) == 4


def test_a_fast_rate_takes_tokens_ahead_and_asks_the_database_seldom(
    limit: Any, alias: str, django_assert_max_num_queries: Any
) -> None:
    item = limit("10000/s", 1000)
    with django_assert_max_num_queries(12, connection=connections[alias]):
        assert item.take(1) == 1
    with django_assert_max_num_queries(0, connection=connections[alias]):
        taken = sum(item.take(1) for _ in range(400))
    assert taken <= 499


def test_many_threads_take_no_more_than_there_is(limit: Any, alias: str) -> None:
    limits = [limit("1/h", 50) for _ in range(6)]
    taken: list[int] = []

    def take(subscription: RateLimit) -> None:
        taken.append(sum(subscription.take(3) for _ in range(20)))
        connections.close_all()

    threads = [threading.Thread(target=take, args=(limit,)) for limit in limits]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sum(taken) == 50


def test_receive_gets_as_many_as_the_rate_allows(limit: Any, alias: str) -> None:
    limit("6/h", 3)
    Leased.send_many(({"n": n} for n in range(9)), using=alias)

    with Leased.receive(2, using=alias) as first, Leased.receive(9, using=alias) as second:
        assert (len(first), len(second)) == (2, 1)
        with Leased.receive(9, using=alias) as third:
            assert len(third) == 0


def test_a_rollback_gives_no_token_back(alias: str, delivery: Any) -> None:
    delivery(RatedTransactional, rate="6/h", rate_burst=3)
    RatedTransactional.send_many(({"n": n} for n in range(9)), using=alias)

    with transaction.atomic(using=alias):
        with RatedTransactional.receive(3, using=alias) as batch:
            assert len(batch) == 3
        transaction.set_rollback(True, using=alias)

    assert rate_limit_of(RatedTransactional, alias).take(3) == 0
