"""Unroutable messages are a figure: unknown types, recipients that no consumer has, and what is kept for queues
that are no more."""

from __future__ import annotations

import json
import uuid
from datetime import timedelta
from io import StringIO
from typing import Any

import msgspec
import pytest
from django.core.management import call_command
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

from queueapp.models import DISPATCHER, MAINTENANCE, Now, PoisonMessage, Subscriber
from queueapp.operations import live_workers, statistics
from queueapp.operations.statistics import queue_stats
from tests.in_process_worker import real_commits
from tests.testapp.models import Addressed, AddressedUrgent, Leased, Urgent

pytestmark = real_commits

KNOWN = [["tests.known", "tests.Known"]]


class Strange(msgspec.Struct):
    number: int = 0


STRANGE = f"{__name__}.Strange"


def live(
    queue: Any, consumers: list[list[str]] | None = None, unknown: list[str] | None = None, **more: Any
) -> Subscriber:
    given = {
        "consumers": json.dumps(KNOWN if consumers is None else consumers),
        "unknown_types": json.dumps(unknown or []),
        "host": "h",
        "process": 1,
        "supervisor": uuid.uuid4(),
        "alive_until": Now() + timedelta(hours=1),
        **more,
    }
    return Subscriber.objects.create(queue=queue if isinstance(queue, str) else queue._meta.label, **given)


def remaining(queue: Any) -> list[tuple[str, str, int | None, bool]]:
    (stats,) = queue_stats([queue])
    assert not stats.error
    return [(it.what, it.name, it.count, it.exact) for it in stats.unroutable]


def test_types_that_no_live_worker_knows_are_counted_and_have_an_age() -> None:
    live(Leased, unknown=[STRANGE])
    for _ in range(3):
        Leased.send(Strange())
    Leased.send({"no": "type"})
    Leased.objects.filter(pk=Leased.objects.values_list("pk", flat=True).first()).update(
        enqueued_at=Now() - timedelta(hours=2)
    )
    (stats,) = queue_stats([Leased])
    (found,) = stats.unroutable
    assert (found.what, found.name, found.count, found.exact) == ("type", STRANGE, 3, True)
    assert found.oldest_seconds is not None
    assert 7200 <= found.oldest_seconds < 7300

    out = StringIO()
    call_command("queuestats", "testapp.Leased", stdout=out)
    assert (
        f"testapp.Leased: 3 messages for type '{STRANGE}', no consumer in a live worker; the oldest is 2h old"
        in out.getvalue()
    )
    out = StringIO()
    call_command("queuestats", "testapp.Leased", "--json", stdout=out)
    assert json.loads(out.getvalue())[0]["unroutable"][0]["name"] == STRANGE


def test_a_type_of_another_live_worker_is_not_reported() -> None:
    live(Leased, unknown=[STRANGE])
    live(Leased, consumers=[["tests.strange", STRANGE]])
    Leased.send(Strange())
    assert remaining(Leased) == []


def test_types_that_are_gone_are_no_longer_reported() -> None:
    live(Leased, unknown=[STRANGE])
    Leased.send({"no": "type"})
    assert remaining(Leased) == []


def test_types_of_a_large_table_are_reported_beyond_the_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "LIMIT", 2)
    live(Leased, unknown=[STRANGE])
    Leased.send_many([{}, {}, {}, Strange()])
    assert remaining(Leased) == [("type", STRANGE, None, False)]


def test_recipients_that_no_live_consumer_has() -> None:
    live(Addressed, unknown=[STRANGE])
    Addressed.send({}, recipient="tests.known")
    for _ in range(2):
        Addressed.send({}, recipient="tests.renamed", unknown_recipient=True)
    Addressed.send(Strange())
    assert remaining(Addressed) == [("recipient", "tests.renamed", 2, True), ("type", STRANGE, 1, True)]


def test_recipients_are_not_guessed_where_a_worker_does_not_report() -> None:
    live(Addressed)
    live(Addressed, consumers=[])
    Addressed.send({}, recipient="tests.renamed", unknown_recipient=True)
    assert remaining(Addressed) == []


def test_recipients_and_types_of_each_level() -> None:
    live(AddressedUrgent, unknown=[STRANGE])
    live(Urgent, unknown=[STRANGE])
    for priority in range(3):
        AddressedUrgent.send({}, priority=priority, recipient="tests.renamed", unknown_recipient=True)
        AddressedUrgent.send(Strange(), priority=priority)
        Urgent.send(Strange(), priority=priority)
    assert sorted(remaining(AddressedUrgent)) == [("recipient", "tests.renamed", 3, True), ("type", STRANGE, 3, True)]
    assert remaining(Urgent) == [("type", STRANGE, 3, True)]


def test_levels_are_found_by_seeks_however_many_messages_they_have() -> None:
    live(Addressed)
    if connection.vendor != "postgresql":
        pytest.skip("it counts what PostgreSQL reads")
    rows = 100_000
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO testapp_addressed (id, headers, recipient) SELECT gen_random_uuid(), '{}', "
            f"CASE n %% 3 WHEN 0 THEN 'tests.known' WHEN 1 THEN 'tests.other' ELSE 'x' END FROM generate_series(1, "
            f"{rows}) n".replace("%%", "%")
        )
    sql = "SELECT seq_tup_read + idx_tup_fetch FROM pg_stat_xact_user_tables WHERE relname = 'testapp_addressed'"
    with transaction.atomic(), connection.cursor() as cursor:
        assert remaining(Addressed) == [("recipient", "tests.other", 10_000, False), ("recipient", "x", 10_000, False)]
        cursor.execute(sql)
        assert cursor.fetchone()[0] <= 3 * 10_001 + 50


def test_poison_of_queues_that_are_no_more_is_a_line_of_its_own() -> None:
    for queue in ("gone.Queue", "gone.Queue", "other.Project"):
        PoisonMessage.objects.create(message_id=uuid.uuid4(), queue=queue, reason="r")
    live("other.Project")
    found = {stats.queue: stats for stats in queue_stats()}
    assert (found["gone.Queue"].poison, found["gone.Queue"].poison_exact) == (2, True)
    assert found["gone.Queue"].note
    assert "other.Project" not in found, "it has a worker, so it is another project's"


@pytest.mark.parametrize(
    ("name", "means"), [(DISPATCHER, "no dispatcher is running"), (MAINTENANCE, "no maintenance is running")]
)
def test_dispatchers_and_housekeepers_are_lines_of_their_own_with_their_trouble(name: str, means: str) -> None:
    (stats,) = [item for item in queue_stats() if item.queue == name]
    assert stats.workers == 0
    assert stats.note.startswith(means)
    live(name)
    Subscriber.objects.update(heartbeat_at=Now() - timedelta(minutes=3), alive_until=Now() - timedelta(minutes=2))
    (stats,) = [item for item in queue_stats() if item.queue == name]
    assert stats.workers == 0
    assert stats.note.endswith("; last heartbeat 3m ago")
    trouble = [{"breaker": "dispatch", "name": "Dispatch of due messages in default", "state": "failing", "error": "e"}]
    live(name, breakers=json.dumps(trouble))
    (stats,) = [item for item in queue_stats() if item.queue == name]
    assert (stats.workers, stats.breakers, stats.note) == (1, trouble, "")


def test_what_a_worker_of_another_version_states_is_shown_as_it_is() -> None:
    live(Leased, breakers="Peek of testapp.Leased: armed: gone", consumers=[], unknown=[])
    Subscriber.objects.update(unknown_types="", consumers="")
    (stats,) = queue_stats([Leased])
    assert [trouble["error"] for trouble in stats.breakers] == ["Peek of testapp.Leased: armed: gone"]


def test_priorities_without_a_level_are_named_whichever_workers_live() -> None:
    for priority in (9, 9, -1, 0, 2):
        Urgent.send({})
        Urgent.objects.filter(pk=Urgent.objects.values_list("pk", flat=True).last()).update(priority=priority)
    expected = [("priority", "-1", 1, True), ("priority", "9", 2, True)]
    assert sorted(remaining(Urgent)) == expected
    live(Urgent)
    assert sorted(remaining(Urgent)) == expected

    out = StringIO()
    call_command("queuestats", "testapp.Urgent", stdout=out)
    assert (
        "testapp.Urgent: 2 messages of priority 9, above the queue's levels: maintenance gives them" in out.getvalue()
    )


def test_priorities_beyond_the_levels_are_distinguished_from_recipients() -> None:
    live(AddressedUrgent)
    for recipient in ("tests.known", "tests.renamed"):
        AddressedUrgent.send({}, recipient=recipient, unknown_recipient=True)
    AddressedUrgent.objects.update(priority=7)
    AddressedUrgent.send({}, recipient="tests.renamed", unknown_recipient=True)

    assert sorted(remaining(AddressedUrgent)) == [("priority", "7", 2, True), ("recipient", "tests.renamed", 1, True)]


def test_maintenance_searches_unroutable_messages_only_where_they_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[Any] = []
    look = live_workers.find_unroutable

    def noted(queue: Any, *given: Any) -> list[live_workers.Unroutable]:
        looked_at.append(queue)
        return look(queue, *given)

    monkeypatch.setattr(statistics, "find_unroutable", noted)

    def tables() -> list[Any]:
        looked_at.clear()
        statistics.unroutable_in("default")
        return [queue for queue in (Leased, Addressed, Urgent) if queue in looked_at]

    assert tables() == [Urgent]  # of which no worker has to say anything
    live(Leased)
    assert tables() == [Urgent]
    live(Addressed)
    assert tables() == [Addressed, Urgent]
    live(Leased, unknown=[STRANGE])
    assert tables() == [Leased, Addressed, Urgent]


def test_maintenance_names_what_the_figures_show_and_counts_nothing_else() -> None:
    live(Leased, unknown=[STRANGE])
    live(Addressed)
    Leased.send(Strange())
    Addressed.send({}, recipient="tests.gone", unknown_recipient=True)
    PoisonMessage.objects.create(message_id=uuid.uuid4(), queue="testapp.Leased", reason="r")

    with CaptureQueriesContext(connection) as context:
        found = statistics.unroutable_in("default")

    shown = [(stats.queue, rest) for stats in queue_stats([Addressed, Leased]) for rest in stats.unroutable]
    assert sorted((queue, rest.what, rest.count) for queue, rest in found) == sorted(
        (queue, rest.what, rest.count) for queue, rest in shown
    )
    assert {rest.what for _, rest in found} == {"recipient", "type"}
    assert not [item["sql"] for item in context if "COUNT(" in item["sql"] and "poison" in item["sql"]]
