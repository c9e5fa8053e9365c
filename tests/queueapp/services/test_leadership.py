"""One process per database holds a role; its lease is by the database's clock and its word is fenced by the term."""

from __future__ import annotations

import threading
import uuid
from datetime import timedelta

import pytest
from django.db import connections

from queueapp.models import Leader, Now
from queueapp.services import leader_election
from queueapp.services.leader_election import Leadership
from tests.in_process_worker import eventually, real_commits

pytestmark = real_commits


def candidate() -> Leadership:
    return Leadership("default", "tests", uuid.uuid4())


def let_lapse() -> None:
    """The present holder's lease is over, by the database's clock."""
    Leader.objects.update(expires=Now() - timedelta(seconds=1))


def renewal_is_due(one: Leadership) -> None:
    one._renew_at = 0.0


def test_the_first_to_ask_leads_and_the_other_waits() -> None:
    one, other = candidate(), candidate()

    assert one.hold()
    assert not other.hold()
    assert (one.held, other.held) == (True, False)
    assert (one.term, other.term) == (1, 0)


def test_a_lapsed_lease_is_taken_over_with_a_new_term() -> None:
    one, other = candidate(), candidate()
    one.hold()
    let_lapse()

    assert other.hold()

    assert other.term == 2
    renewal_is_due(one)
    assert not one.hold(), "the old leader finds out when it renews"
    assert not one.held


def test_a_leader_renews_its_lease() -> None:
    one, other = candidate(), candidate()
    one.hold()
    first = Leader.objects.get().expires
    renewal_is_due(one)

    assert one.hold()

    assert Leader.objects.get().expires > first
    assert one.term == 1, "the same term goes on"
    assert not other.hold()


def test_a_leader_does_not_ask_the_database_before_its_time(django_assert_num_queries: object) -> None:
    one = candidate()
    one.hold()

    with django_assert_num_queries(0):  # type: ignore[operator]
        assert one.hold()


def test_a_leader_that_could_not_renew_in_time_steps_down_before_its_lease_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = candidate()
    now = [1000.0]
    monkeypatch.setattr(leader_election, "monotonic", lambda: now[0])
    one.hold()

    now[0] += leader_election.TERM.total_seconds() - leader_election.MARGIN - 0.1
    assert one.held
    now[0] += 0.2

    assert not one.held


def test_resigning_lets_the_next_one_lead_at_once() -> None:
    one, other = candidate(), candidate()
    one.hold()

    one.resign()

    assert not one.held
    assert other.hold()


def test_an_old_leader_cannot_resign_for_the_new_one() -> None:
    one, other, third = candidate(), candidate(), candidate()
    one.hold()
    let_lapse()
    other.hold()

    one.resign()

    assert not third.hold()
    assert other.held


def test_a_restarted_process_takes_its_own_role_back_at_once() -> None:
    holder = uuid.uuid4()
    Leadership("default", "tests", holder).hold()

    again = Leadership("default", "tests", holder)

    assert again.hold()
    assert again.term == 2, "what its old life still sends is fenced"


def test_a_shorter_lease_is_over_sooner() -> None:
    one = Leadership("default", "tests", uuid.uuid4(), timedelta(seconds=2))
    other = candidate()
    assert one.hold()
    row = Leader.objects.get(role="tests")
    assert row.expires - row.elected_at <= timedelta(seconds=2)

    eventually(other.hold)  # long before a lease of the usual length is over

    assert not one.hold()


@pytest.mark.parametrize("seconds", [1, 16])
def test_a_lease_that_is_no_good_is_refused(seconds: int) -> None:
    with pytest.raises(ValueError, match="more than 1 s, and at most 0:00:15"):
        Leadership("default", "tests", uuid.uuid4(), timedelta(seconds=seconds))


def test_roles_are_independent() -> None:
    one, other = candidate(), Leadership("default", "another role", uuid.uuid4())

    assert one.hold()
    assert other.hold()


def test_of_many_candidates_at_once_one_is_elected() -> None:
    start = threading.Barrier(8)
    elected: list[bool] = []

    def run() -> None:
        start.wait()
        elected.append(candidate().hold())
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
    one.hold()
    Leader.objects.update(expires=Now() + timedelta(days=365))

    assert other.hold()

    assert other.term == 2
    assert not candidate().hold()
