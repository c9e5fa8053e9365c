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


def let_lapse() -> None:
    """The present holder's lease is over, by the database's clock."""
    Leader.objects.update(expires=Now() - timedelta(seconds=1))


def renewal_is_due(one: Elector) -> None:
    one._renew_at = 0.0


def test_the_first_to_ask_leads_and_the_other_waits() -> None:
    one, other = candidate(), candidate()

    assert one.try_lead()
    assert not other.try_lead()
    assert (one.is_leader, other.is_leader) == (True, False)
    assert (one.term, other.term) == (1, 0)


def test_a_lapsed_lease_is_taken_over_with_a_new_term() -> None:
    one, other = candidate(), candidate()
    one.try_lead()
    let_lapse()

    assert other.try_lead()

    assert other.term == 2
    renewal_is_due(one)
    assert not one.try_lead(), "the old leader finds out when it renews"
    assert not one.is_leader


def test_a_leader_renews_its_lease() -> None:
    one, other = candidate(), candidate()
    one.try_lead()
    first = Leader.objects.get().expires
    renewal_is_due(one)

    assert one.try_lead()

    assert Leader.objects.get().expires > first
    assert one.term == 1, "the same term goes on"
    assert not other.try_lead()


def test_a_leader_does_not_ask_the_database_before_its_time(django_assert_num_queries: object) -> None:
    one = candidate()
    one.try_lead()

    with django_assert_num_queries(0):  # type: ignore[operator]
        assert one.try_lead()


def test_a_leader_that_could_not_renew_in_time_steps_down_before_its_lease_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = candidate()
    now = [1000.0]
    monkeypatch.setattr(leader_election, "monotonic", lambda: now[0])
    one.try_lead()

    now[0] += leader_election.TERM.total_seconds() - leader_election.MARGIN - 0.1
    assert one.is_leader
    now[0] += 0.2

    assert not one.is_leader


def test_resigning_lets_the_next_one_lead_at_once() -> None:
    one, other = candidate(), candidate()
    one.try_lead()

    one.resign()

    assert not one.is_leader
    assert other.try_lead()


def test_an_old_leader_cannot_resign_for_the_new_one() -> None:
    one, other, third = candidate(), candidate(), candidate()
    one.try_lead()
    let_lapse()
    other.try_lead()

    one.resign()

    assert not third.try_lead()
    assert other.is_leader


def test_an_old_life_of_a_process_cannot_resign_for_its_new_one() -> None:
    holder = uuid.uuid4()
    old, new, third = (Elector("default", "tests", each) for each in (holder, holder, uuid.uuid4()))
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
    one = Elector("default", "tests", uuid.uuid4(), timedelta(seconds=2))
    other = candidate()
    assert one.try_lead()
    row = Leader.objects.get(role="tests")
    assert row.expires - row.elected_at <= timedelta(seconds=2)

    eventually(other.try_lead)  # long before a lease of the usual length is over

    assert not one.try_lead()


@pytest.mark.parametrize("seconds", [1, 16])
def test_a_lease_that_is_no_good_is_refused(seconds: int) -> None:
    with pytest.raises(ValueError, match="more than 1 s, and at most 0:00:15"):
        Elector("default", "tests", uuid.uuid4(), timedelta(seconds=seconds))


def test_roles_are_independent() -> None:
    one, other = candidate(), Elector("default", "another role", uuid.uuid4())

    assert one.try_lead()
    assert other.try_lead()


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


def test_a_lease_of_a_clock_that_was_set_back_keeps_nobody_from_leading() -> None:
    """It was ahead by a year, or the server that has taken over is behind: nobody grants himself so much."""
    one, other = candidate(), candidate()
    one.try_lead()
    Leader.objects.update(expires=Now() + timedelta(days=365))

    assert other.try_lead()

    assert other.term == 2
    assert not candidate().try_lead()
