"""The statistics that AMPS names."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from io import StringIO

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError
from django.db import connection, transaction

from queueapp import overrides
from queueapp.messages import new_id
from queueapp.models import QueueControl, Subscriber
from queueapp.operations import control, statistics
from queueapp.sql import queue_sql
from queueapp.sql.claims import SeqRange
from tests.in_process_worker import DEADLINE, real_commits
from tests.testapp.models import Capped, Leased, Recovered

pytestmark = real_commits


def figures_of(queue: type) -> statistics.QueueStats:
    return statistics.queue_stats([queue])[0]


def test_queue_depth_backlog_and_their_ages_of_a_counted_queue() -> None:
    Capped.send_many({"n": n} for n in range(8))
    subscriber = Subscriber.objects.create(
        queue=Capped._meta.label,
        host="here",
        process=7,
        supervisor=new_id(),
        backlog=4,
        filter="/n > 1",
        leases_lost=3,
        outstanding=99,
        alive_until="2990-01-01T00:00:00Z",
    )
    queue_sql(Capped, connection).limits.claim_within(connection, [SeqRange()], 3, new_id(), subscriber.pk, 60_000, 5)
    control.set_option(Capped, "max_backlog", 4)

    flow = figures_of(Capped).amps

    assert (flow.queue_depth, flow.backlog, flow.max_backlog, flow.expired_leases) == (8, 3, 4, 3)
    assert flow.seconds_behind is not None
    assert 0 <= flow.seconds_behind < 60
    assert flow.age_of_oldest_lease is not None
    assert 0 <= flow.age_of_oldest_lease < 60
    (subscription,) = flow.subscriptions
    assert (subscription.process, subscription.filter, subscription.backlog) == ("here:7", "/n > 1", 4)
    assert subscription.outstanding == 3, "by the leases, and not as it said"


def test_statistics_that_are_unknown_are_null_and_not_0() -> None:
    out = StringIO()
    call_command("queuestats", "testapp.Leased", json=True, stdout=out)
    (found,) = json.loads(out.getvalue())

    unknown = ("max_backlog", "age_of_oldest_lease", "seconds_behind", "expired_leases", "deferred_ack_count",
               "inactive_message_count", "target_queue_depth")  # fmt: skip
    assert [name for name in unknown if found[name] is not None] == []
    assert (found["queue_depth"], found["backlog"], found["subscriptions"]) == (0, 0, [])
    assert (found["topic"], figures_of(Recovered).amps.topic) == ("Leased", "journaled.orders")


def test_setqueue_sets_nothing_where_one_of_several_is_refused() -> None:
    for item, second in (
        ({"max_backlog": "3"}, {"target_queue_depth": "9"}),
        ({"max_backlog": "3"}, {"lease_period": "x"}),
    ):
        with pytest.raises(CommandError, match="is not accepted"):
            call_command("setqueue", "testapp.Capped", **item, **second)
        assert not QueueControl.objects.exists()


def test_setqueue_sets_shows_and_takes_back() -> None:
    out = StringIO()
    call_command("setqueue", "testapp.Capped", max_backlog="3", lease_period="90", stdout=out)
    row = QueueControl.objects.get()
    assert (row.max_backlog, row.lease_period.total_seconds()) == (3, 90)  # type: ignore[union-attr]
    call_command("setqueue", "testapp.Capped", stdout=out)
    call_command("setqueue", "testapp.Capped", max_backlog="none", stdout=out)
    row.refresh_from_db()
    assert row.max_backlog is None
    assert "testapp.Capped: max_backlog is 3.\n" in out.getvalue()
    assert "max_backlog is as declared." in out.getvalue()


@pytest.mark.parametrize(
    ("queue", "option", "value", "said"),
    [
        (Capped, "max_backlog", "0", "from 1 to 1000000"),
        (Capped, "max_backlog", "many", "a whole number"),
        (Capped, "lease_period", "0.01", "0:00:00.100000"),
        (Leased, "max_backlog", "5", "no record of its claims"),
        (Leased, "target_queue_depth", "5000", "declares none"),
        (Leased, "expiration", "60", "no index to find by age"),
    ],
)
def test_setqueue_refuses_what_the_declaration_would(queue: type, option: str, value: str, said: str) -> None:
    with pytest.raises(CommandError, match=said):
        call_command("setqueue", queue._meta.label, **{option: value})  # type: ignore[attr-defined]
    assert not QueueControl.objects.exists()


def test_a_value_that_was_set_and_rolled_back_has_no_effect() -> None:
    with transaction.atomic():
        assert control.set_option(Capped, "max_backlog", 1)
        assert overrides.effective_value(Capped, "max_backlog", "default") == 1  # true of this transaction
        assert overrides.reload("default")["testapp.Capped"] == {"max_backlog": 1}
        transaction.set_rollback(True)
    assert overrides.effective_value(Capped, "max_backlog", "default") == 5
    with transaction.atomic():
        assert control.set_option(Capped, "max_backlog", 1)
        assert overrides.effective_value(Capped, "max_backlog", "default") == 1
    assert overrides.effective_value(Capped, "max_backlog", "default") == 1
    assert control.set_option(Capped, "max_backlog", None)


def test_what_was_committed_is_believed_at_once_by_a_thread_that_read_before() -> None:
    seen: list[int] = []

    def look() -> None:
        seen.append(overrides.effective_value(Capped, "max_backlog", "default"))
        connection.close()

    with ThreadPoolExecutor() as thread:
        with transaction.atomic():
            control.set_option(Capped, "max_backlog", 1)
            thread.submit(look).result(DEADLINE)
        thread.submit(look).result(DEADLINE)
    assert seen == [5, 1]
