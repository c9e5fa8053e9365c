"""A topic whose queues lie in two databases: one transaction in each, a journal in each, and what becomes of a
failure."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.db import DatabaseError, transaction

from queueapp import publish, publish_many, replay
from queueapp.models import JournalEntry
from queueapp.models.delivery import Delivery
from queueapp.topics import publisher
from queueapp.topics.backfill import QueueFeeder
from tests.crash.conftest import scene, server, two  # noqa: F401 (two databases, and a server of their own)
from tests.crash.rig.two_databases import TwoDatabases
from tests.crash.workload.routes import WAREHOUSE
from tests.testapp.models import Leased, Transactional

TOPIC = "journaled.both"


@pytest.fixture(autouse=True)
def collecting(two: TwoDatabases, settings: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:  # noqa: F811
    """One queue here and one in the warehouse collect the topic, which is journaled."""
    settings.QUEUEAPP = {"JOURNAL": {"^journaled": timedelta(hours=1)}}
    for queue in (Leased, Transactional):
        given = queue.delivery.given | {"underlying_topic": TOPIC}
        monkeypatch.setattr(queue, "delivery", Delivery(given, "a test's "))
    publisher.forget()
    yield
    monkeypatch.undo()
    publisher.forget()


def stored() -> tuple[int, int, int, int]:
    """Messages and entries, here and in the warehouse."""
    entries = [JournalEntry.objects.using(alias).count() for alias in ("default", WAREHOUSE)]
    return Leased.objects.count(), entries[0], Transactional.objects.count(), entries[1]


def refuse(of: Any, when: str) -> None:
    """Nothing is put into the queue there: at once, or at the commit."""
    of.execute("CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN RAISE EXCEPTION 'refused'; END$$")
    kind, deferred = ("CONSTRAINT ", "DEFERRABLE INITIALLY DEFERRED ") if when == "at the commit" else ("", "")
    for table in ("testapp_leased", "testapp_transactional"):
        of.execute(
            f"CREATE {kind}TRIGGER refuse AFTER INSERT ON {table} {deferred}FOR EACH ROW EXECUTE FUNCTION refuse()"
        )


def test_topic_over_two_databases_is_in_the_queue_and_in_the_journal_of_each() -> None:
    identity = publish(TOPIC, {"n": 1})
    assert publish_many(TOPIC, [{"n": 2}, {"n": 3}]) == 2

    assert stored() == (3, 3, 3, 3)
    assert Leased.objects.earliest("seq").id == Transactional.objects.earliest("seq").id == identity
    for alias, queue in (("default", Leased), (WAREHOUSE, Transactional)):
        assert [entry.decode()["n"] for entry in replay(TOPIC, using=alias)] == [1, 2, 3]
        queues = JournalEntry.objects.using(alias).values_list("queues", flat=True)
        assert all(queue._meta.label in item for item in queues), "each journal knows of the queues beside it"
        QueueFeeder(queue, alias).attach()
        assert QueueFeeder(queue, alias).fill().copied == 0

    # The caller's transaction of one database takes back what is there, and no more.
    with transaction.atomic():
        publish(TOPIC, {"n": 4})
        transaction.set_rollback(True)
    assert stored() == (3, 3, 4, 4)
    with transaction.atomic(), transaction.atomic(using=WAREHOUSE):
        publish(TOPIC, {"n": 5})
        transaction.set_rollback(True)
        transaction.set_rollback(True, using=WAREHOUSE)
    assert stored() == (3, 3, 4, 4)


def test_topic_over_two_databases_is_stored_in_none_where_one_refuses_it(two: TwoDatabases) -> None:  # noqa: F811
    for place in (two.here, two.there):
        refuse(place, "at once")
        with pytest.raises(DatabaseError, match="refused"):
            publish(TOPIC, {"n": 1})
        with pytest.raises(DatabaseError, match="refused"):
            publish_many(TOPIC, [{"n": 1}])
        assert stored() == (0, 0, 0, 0)
        place.execute("DROP FUNCTION refuse() CASCADE")


def test_topic_over_two_databases_a_commit_that_fails_after_another_is_reported_and_leaves_some_queues_filled(
    two: TwoDatabases,  # noqa: F811
) -> None:
    """Two databases have no common commit. Their order is not promised."""
    refuse(two.here, "at the commit")
    with pytest.raises(DatabaseError, match="refused"):
        publish(TOPIC, {"n": 1})
    assert stored() == (0, 0, 1, 1)
    refuse(two.there, "at the commit")
    with pytest.raises(DatabaseError, match="refused"):
        publish(TOPIC, {"n": 2})
    assert stored() == (0, 0, 1, 1), "the first commit failed, so nothing was stored"
