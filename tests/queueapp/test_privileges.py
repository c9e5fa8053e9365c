"""The GRANTs of docs/privileges.md are enough, and no more than enough, for what each role does."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from django.db import ProgrammingError, connection

from queueapp import delayed, poison
from queueapp.models import DelayedMessage, Leader, Now, PoisonMessage, QueueControl, Subscriber
from queueapp.operating.statistics import figures
from queueapp.recovery import carrying_out, verdicts
from queueapp.sql import queue_sql
from queueapp.sql.claimed import SEQ, Range
from tests.testapp.models import Leased
from workers.services.housekeeping import purge_expired, release_leases_of_dead_subscribers
from workers.services.leadership import Leadership

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(connection.vendor != "postgresql", reason="the grants tested are PostgreSQL's"),
]
DOCS = (Path(__file__).parents[2] / "docs" / "privileges.md").read_text()


def grants(role: str) -> list[str]:
    """The documented GRANT statements for a role, for the table of ``Leased``."""
    text = re.sub(r"--.*", "", DOCS.replace("<queue>", Leased._meta.db_table))
    return [one for one in re.findall(r"GRANT[^;]+;", text) if f" TO {role};" in re.sub(r"\s+", " ", one)]


@contextmanager
def acting_as(role: str) -> Iterator[None]:
    """Run the block with the privileges of a new role that has the documented grants and nothing else."""
    name = f"{role}_{uuid.uuid4().hex[:12]}"
    statements = grants(role)
    assert statements, f"docs/privileges.md has no grants for {role}"
    with connection.cursor() as cursor:
        cursor.execute(f'CREATE ROLE "{name}"')
        try:
            for statement in statements:
                cursor.execute(re.sub(rf" TO {role};", f' TO "{name}";', statement))
            cursor.execute(f'SET ROLE "{name}"')
            yield
        finally:
            cursor.execute("RESET ROLE")
            cursor.execute(f'DROP OWNED BY "{name}"')
            cursor.execute(f'DROP ROLE "{name}"')


def claim_one() -> tuple[int, uuid.UUID]:
    token = uuid.uuid4()
    rows = queue_sql(Leased, connection).claim_by_lease(connection, [Range()], 1, token, uuid.uuid4(), 60_000)
    return rows[0][SEQ], token


def test_a_producer_sends_in_every_way_and_cannot_read_or_delete() -> None:
    with acting_as("producer"):
        Leased.send({"n": 1})
        Leased.send({"n": 2}, delay=timedelta(hours=1), expires_in=timedelta(hours=1))
        assert Leased.send_many({"n": n} for n in range(5)) == 5
        with pytest.raises(ProgrammingError, match="permission denied"):
            list(Leased.objects.all())
        with pytest.raises(ProgrammingError, match="permission denied"), Leased.receive(1):
            pass
    assert Leased.objects.count() == 6
    assert DelayedMessage.objects.count() == 1


def test_a_worker_receives_ends_fails_dispatches_and_keeps_house() -> None:
    Leased.send_many({"n": n} for n in range(6))
    Leased.send({"n": 7}, delay=timedelta(0))
    with acting_as("worker"):
        sql = queue_sql(Leased, connection)
        assert sql.peek(connection, [Range()], [], 100).ahead == 6
        seq, token = claim_one()
        assert sql.extend(connection, [seq], token, 1000) == [seq]
        assert sql.ack(connection, [seq], token) == 1
        assert len(sql.claim_by_delete(connection, [Range()], 1)) == 1
        seq, token = claim_one()
        assert sql.give_back(connection, [seq], token, handled=False) == 1
        for attempt in range(5):
            verdict = carrying_out.fail(Leased, "default", seq, ValueError("no"), consumer=None, token=None)
            assert verdict is not None
            if isinstance(verdict, verdicts.RetryLater):
                assert delayed.make_due(DelayedMessage.objects.all()) >= 1
                assert delayed.dispatch_due("default", 10).moved >= 1
                seq = max(Leased.objects.values_list("seq", flat=True))
            assert attempt < 5
        assert PoisonMessage.objects.count() == 1
        Subscriber.objects.create(
            queue="x", host="h", process=1, supervisor=uuid.uuid4(), alive_until=Now() - timedelta(1)
        )
        row = Subscriber.objects.create(
            queue=Leased._meta.label, host="h", process=2, supervisor=uuid.uuid4(), alive_until=Now() - timedelta(1)
        )
        release_leases_of_dead_subscribers("default")
        assert not Subscriber.objects.filter(pk=row.pk).exists()
        assert QueueControl.objects.filter(queue=Leased._meta.label, careful_until__gt=Now()).exists()
        purge_expired(Leased, "default")
        leadership = Leadership("default", "test", uuid.uuid4())
        assert leadership.hold()
        leadership.resign()
        assert poison.drop_old(timedelta(hours=1)) == 0
        with pytest.raises(ProgrammingError, match="permission denied"):
            PoisonMessage.objects.update(reason="forged")
    assert Leader.objects.get(role="test").term == 1


def test_an_inspector_reads_figures_and_changes_nothing() -> None:
    Leased.send({"n": 1})
    with acting_as("inspector"):
        (found,) = figures([Leased])
        assert (found.waiting, found.error) == (1, "")
        assert list(PoisonMessage.objects.all()) == []
        with pytest.raises(ProgrammingError, match="permission denied"):
            Leased.send({"n": 2})
        with pytest.raises(ProgrammingError, match="permission denied"):
            Leased.objects.update(priority=1)
