"""Barriers between their release and their handler: who waits for them, and what becomes of those of a subscriber that
is gone."""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import Any

import pytest
from django.db import connections

from queueapp.models import BarrierDelivery, Now, Subscriber
from queueapp.receiving import barriers
from queueapp.services.orphaned_leases import release_orphaned_leases
from tests.databases import DATABASES, marks_of
from tests.testapp.ordering import Fenced, FencedAddressed
from workers.processes.until_empty import is_empty, remaining

pytestmark = pytest.mark.parametrize(
    "alias", [pytest.param(alias, id=name, marks=marks_of(alias)) for name, alias in DATABASES.items()]
)


def subscriber(alias: str, alive: timedelta = timedelta(minutes=5), **options: Any) -> uuid.UUID:
    identity = uuid.uuid4()
    Subscriber.objects.using(alias).create(
        id=identity,
        queue=Fenced._meta.label,
        table=Fenced._meta.db_table,
        host="there",
        process=1,
        supervisor=uuid.uuid4(),
        alive_until=Now() + alive,
        **options,
    )
    return identity


def test_barrier_that_was_not_taken_yet_is_waited_for(alias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("django.db.router.db_for_write", lambda model, **hints: alias)
    item = subscriber(alias)
    Fenced.send({}, is_barrier=True, using=alias)
    assert barriers.release(Fenced, alias) == 1

    assert not is_empty([Fenced])
    rest = remaining([Fenced], runs_maintenance=True)
    assert rest.words == "testapp.Fenced: 1 released barrier not yet taken by the workers"
    assert not rest.hopeless

    assert barriers.take(alias, item) is not None
    assert barriers.take(alias, item) is None
    assert is_empty([Fenced])


def test_barriers_of_a_dead_subscriber_go_with_it(alias: str) -> None:
    dead, live = subscriber(alias), subscriber(alias)
    Fenced.send({}, is_barrier=True, using=alias)
    assert barriers.release(Fenced, alias) == 1
    assert set(BarrierDelivery.objects.using(alias).values_list("subscriber", flat=True)) == {dead, live}

    Subscriber.objects.using(alias).filter(pk=dead).update(alive_until=Now() - timedelta(minutes=1))
    release_orphaned_leases(alias)

    assert set(BarrierDelivery.objects.using(alias).values_list("subscriber", flat=True)) == {live}


def test_barriers_without_an_owner_are_deleted_after_a_while(alias: str) -> None:
    gone, live = subscriber(alias), subscriber(alias)
    Fenced.send({}, is_barrier=True, using=alias)
    assert barriers.release(Fenced, alias) == 1
    Subscriber.objects.using(alias).filter(pk=gone).delete()

    assert barriers.forget_dead(alias) == 0
    BarrierDelivery.objects.using(alias).update(released_at=Now() - timedelta(minutes=2))

    assert barriers.forget_dead(alias) == 1
    assert BarrierDelivery.objects.using(alias).get().subscriber == live


def test_barrier_goes_to_who_lives_and_not_to_who_comes_later(alias: str) -> None:
    item = subscriber(alias)
    late = subscriber(alias, alive=timedelta(minutes=-1))
    Fenced.send({"n": 1}, is_barrier=True, using=alias)
    assert barriers.release(Fenced, alias) == 1
    later = subscriber(alias)

    row = barriers.take(alias, item)
    assert row is not None
    assert bytes(row.body or b"") == b'{"n":1}'
    assert row.is_barrier
    assert barriers.take(alias, late) is None
    assert barriers.take(alias, later) is None


def test_barrier_goes_to_subscribers_whose_filter_matches_whatever_their_backlog(alias: str) -> None:
    matching, without = subscriber(alias, filter="/n = 1"), subscriber(alias, backlog=0)
    subscriber(alias, filter="/n = 2")
    subscriber(alias, receives=False)  # of a receive(), which takes its own
    Fenced.send({"n": 1}, is_barrier=True, using=alias)

    assert barriers.release(Fenced, alias) == 1

    assert set(BarrierDelivery.objects.using(alias).values_list("subscriber", flat=True)) == {matching, without}


def test_barrier_that_no_filter_matches_waits(alias: str) -> None:
    subscriber(alias, filter="/n = 2")
    Fenced.send({"n": 1}, is_barrier=True, using=alias)

    assert barriers.release(Fenced, alias) == 0
    assert Fenced.objects.using(alias).count() == 1


def test_barrier_waits_for_what_a_foreign_producer_commits_late_below_what_was_looked_through(alias: str) -> None:
    """It takes no lock, so it can: the last look before the release begins at the very beginning."""
    subscriber(alias)
    foreign = connections[alias].copy()
    table = connections[alias].ops.quote_name(Fenced._meta.db_table)
    rows = Fenced.objects.using(alias)
    try:
        foreign.set_autocommit(False)
        with foreign.cursor() as cursor:
            cursor.execute(f"INSERT INTO {table} (id, headers) VALUES (%s, '{{}}')", [uuid.uuid4()])
        Fenced.send({}, using=alias)
        sent = rows.values_list("seq", flat=True).get()
        Fenced.send({}, is_barrier=True, using=alias)
        assert barriers.release(Fenced, alias) == 0
        foreign.commit()
    finally:
        foreign.close()
    rows.filter(seq=sent).delete()

    assert barriers.release(Fenced, alias) == 0
    rows.filter(seq__lt=sent).delete()
    assert barriers.release(Fenced, alias) == 1


def test_barrier_that_is_released_wakes_who_is_to_take_it(alias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    woken: list[Any] = []
    Fenced.send({}, is_barrier=True, using=alias)
    monkeypatch.setattr("queueapp.receiving.barriers.notifier.sent", lambda queue, connection: woken.append(queue))
    assert barriers.release(Fenced, alias) == 0
    assert woken == []
    subscriber(alias)
    assert barriers.release(Fenced, alias) == 1
    assert woken == [Fenced]


def test_barrier_for_a_recipient_goes_to_no_receive_for_another(alias: str) -> None:
    FencedAddressed.send({}, is_barrier=True, recipient="one", using=alias)
    with FencedAddressed.receive(recipient="other", using=alias) as batch:
        assert len(batch) == 0
    with FencedAddressed.receive(recipient="one", using=alias) as batch:
        assert [message.is_barrier for message in batch] == [True]
