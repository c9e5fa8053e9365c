"""One process per database holds a role; its lease is by the database's clock and its word is fenced by the term."""

from __future__ import annotations

import threading
import uuid
from datetime import timedelta

import pytest
from django.db import connections

from queueapp.models import Leader, Now
from queueapp.services import leader_election
from queueapp.services.leader_election import Elector
from tests.in_process_worker import eventually, real_commits

pytestmark = real_commits


def candidate() -> Elector:
    return Elector("default", "tests", uuid.uuid4())


def expire_leadership() -> None:
    """The present holder's lease is over, by the database's clock."""
    Leader.objects.update(expires=Now() - timedelta(seconds=1))


def renewal_is_due(elector: Elector) -> None:
    elector.renew_at = 0.0


def test_the_first_to_ask_leads_and_the_other_waits() -> None:
    first, second = candidate(), candidate()

    assert first.try_lead()
    assert not second.try_lead()
    assert (first.is_leader, second.is_leader) == (True, False)
    assert (first.term, second.term) == (1, 0)


def test_an_expired_lease_is_taken_over_with_a_new_term() -> None:
    first, second = candidate(), candidate()
    first.try_lead()
    expire_leadership()

    assert second.try_lead()

    assert second.term == 2
    renewal_is_due(first)
    assert not first.try_lead(), "the old leader finds out when it renews"
    assert not first.is_leader


def test_a_leader_renews_its_lease() -> None:
    item, second = candidate(), candidate()
    item.try_lead()
    first = Leader.objects.get().expires
    renewal_is_due(item)

    assert item.try_lead()

    assert Leader.objects.get().expires > first
    assert item.term == 1, "the same term goes on"
    assert not second.try_lead()


def test_a_leader_does_not_ask_the_database_before_its_time(django_assert_num_queries: object) -> None:
    item = candidate()
    item.try_lead()

    with django_assert_num_queries(0):  # type: ignore[operator]
        assert item.try_lead()


def test_a_leader_that_could_not_renew_in_time_steps_down_before_its_lease_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    item = candidate()
    now = [1000.0]
    monkeypatch.setattr(leader_election, "monotonic", lambda: now[0])
    item.try_lead()

    now[0] += leader_election.TERM.total_seconds() - leader_election.MARGIN - 0.1
    assert item.is_leader
    now[0] += 0.2

    assert not item.is_leader


def test_resigning_lets_the_next_one_lead_at_once() -> None:
    first, second = candidate(), candidate()
    first.try_lead()

    first.resign()

    assert not first.is_leader
    assert second.try_lead()


def test_an_old_leader_cannot_resign_for_the_new_one() -> None:
    first, second, third = candidate(), candidate(), candidate()
    first.try_lead()
    expire_leadership()
    second.try_lead()

    first.resign()

    assert not third.try_lead()
    assert second.is_leader


def test_an_old_life_of_a_process_cannot_resign_for_its_new_one() -> None:
    holder = uuid.uuid4()
    old, new, third = (Elector("default", "tests", item) for item in (holder, holder, uuid.uuid4()))
    old.try_lead()
    new.try_lead()

    old.resign()

    assert not third.try_lead()
    renewal_is_due(new)
    assert new.try_lead()
    assert new.term == 2, "its lease goes on"


def test_a_restarted_process_takes_its_own_role_back_at_once() -> None:
    holder = uuid.uuid4()
    Elector("default", "tests", holder).try_lead()

    again = Elector("default", "tests", holder)

    assert again.try_lead()
    assert again.term == 2, "what its old life still sends is fenced"


def test_a_shorter_lease_is_over_sooner() -> None:
    elector = Elector("default", "tests", uuid.uuid4(), timedelta(seconds=2))
    second_candidate = candidate()
    assert elector.try_lead()
    row = Leader.objects.get(role="tests")
    assert row.expires - row.elected_at <= timedelta(seconds=2)

    eventually(second_candidate.try_lead)  # long before a lease of the usual length is over

    assert not elector.try_lead()


@pytest.mark.parametrize("seconds", [1, 16])
def test_a_lease_that_is_no_good_is_refused(seconds: int) -> None:
    with pytest.raises(ValueError, match="more than 1 s, and at most 0:00:15"):
        Elector("default", "tests", uuid.uuid4(), timedelta(seconds=seconds))


def test_roles_are_independent() -> None:
    first, second = candidate(), Elector("default", "another role", uuid.uuid4())

    assert first.try_lead()
    assert second.try_lead()


def test_of_many_candidates_at_once_one_is_elected() -> None:
    start = threading.Barrier(8)
    elected: list[bool] = []

    def run() -> None:
        start.wait()
        elected.append(candidate().try_lead())
        connections.close_all()

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(elected) == [False] * 7 + [True]
    assert Leader.objects.count() == 1


def test_a_lease_of_a_clock_that_was_set_back_does_not_prevent_an_election() -> None:
    """It was ahead by a year, or the server that has taken over is behind: no process grants itself so much."""
    first, second = candidate(), candidate()
    first.try_lead()
    Leader.objects.update(expires=Now() + timedelta(days=365))

    assert second.try_lead()

    assert second.term == 2
    assert not candidate().try_lead()
