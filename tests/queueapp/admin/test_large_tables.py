"""No page may read more of a table because the table has grown: every query of every page is explained and counted."""

import json
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from queueapp import registry
from queueapp.admin.large_tables import search
from queueapp.models import DelayedMessage, PoisonMessage, QueueControl
from queueapp.operations.snapshots import SnapshotRecorder
from tests.testapp.models import Leased, Urgent

from .conftest import url

#: Thirty times the window, as five million are to the real one: below that, reading everything may be the best plan.
ROWS = 150_000
WINDOW, NEAR, COUNTED = 5_000, 2_500, 500
#: A range of seqs that is chosen without looking may hold more than it was meant to.
MOST_ROWS_READ = 2 * WINDOW + 1

_COLUMNS = {
    Leased: ("id, headers, body", "{id}, '{{\"type\":\"shop.Ordered\"}}', 'abc'"),
    Urgent: ("id, headers, body, priority", "{id}, '{{}}', 'abc', n % 3"),
    DelayedMessage: ("message_id, destination, due", "{id}, 'testapp.Leased', now() + n * interval '1 second'"),
    PoisonMessage: (
        "message_id, queue, reason, exception_type, group_key, status",
        "{id}, 'testapp.Leased', 'r', 'ValueError', 'a', 'unresolved'",
    ),
}

pytestmark = pytest.mark.skipif(connection.vendor != "postgresql", reason="explains its queries as PostgreSQL does")


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("WINDOW", WINDOW), ("NEAR", NEAR), ("COUNTED", COUNTED)):
        monkeypatch.setattr(search, name, value)


def fill(model: Any, rows: int = ROWS) -> None:
    """Rows whose ids are of version 7, a millisecond apart and made when they were stored."""
    columns, values = _COLUMNS[model]
    identity = (
        "overlay(overlay(lpad(to_hex((extract(epoch FROM t) * 1000)::bigint), 12, '0') || md5(n::text) "
        "placing '7' from 13 for 1) placing '8' from 17 for 1)::varchar(32)::uuid"
    )
    timed = model in (Leased, Urgent)
    with connection.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO {model._meta.db_table} ({columns}{', enqueued_at' if timed else ''}) "
            f"SELECT {values.format(id=identity)}{', t' if timed else ''} FROM generate_series(1, {rows}) n, "
            "LATERAL (SELECT timestamptz '2026-01-01 UTC' + n * interval '1 ms') l(t)"
        )
        cursor.execute(f"ANALYZE {model._meta.db_table}")


def rows_read(sql: str) -> int:
    """The most rows that any one scan of a statement read, those it then threw away included."""
    with connection.cursor() as cursor:
        cursor.execute("EXPLAIN (ANALYZE, FORMAT JSON) " + sql)
        plan = cursor.fetchone()[0]
    plan = json.loads(plan) if isinstance(plan, str) else plan
    return max(_reads(plan[0]["Plan"]), default=0)


def _reads(node: dict[str, Any]) -> Iterator[int]:
    if "Relation Name" in node:
        removed = node.get("Rows Removed by Filter", 0) + node.get("Rows Removed by Index Recheck", 0)
        yield round((node["Actual Rows"] + removed) * node["Actual Loops"])
    for child in node.get("Plans", ()):
        yield from _reads(child)


def assert_bounded(client: Client, address: str) -> Any:
    with CaptureQueriesContext(connection) as captured:
        response = client.get(address)
    assert response.status_code == 200, response
    tables = [model._meta.db_table for model in _COLUMNS]
    for query in captured:
        sql = query["sql"]
        if sql.startswith("SELECT") and any(table in sql for table in tables):
            read = rows_read(sql)
            assert read <= MOST_ROWS_READ, (address, read, sql)
            assert "COUNT(" not in sql or "LIMIT" in sql, (address, sql)
    # Two for each queue, of what the tables of all queues hold for it; five for all queues of Celery together.
    # There are savepoints only in a test's transaction.
    limit = 31 + 2 * len(list(registry.queues))
    assert len([query for query in captured if "SAVEPOINT" not in query["sql"]]) <= limit
    return response


@pytest.fixture
def middle(operator: Client) -> Leased:
    """A message in the middle of a large queue, far from both ends."""
    fill(Leased)
    return Leased.objects.order_by("seq")[ROWS // 2]


def test_pages_of_a_large_queue(operator: Client, middle: Leased) -> None:
    listing = url(Leased)
    for query in ("", "?p=5", "?o=-1", "?state=leased", "?state=ready", "?state=lease-expired&o=-1", "?state=expired",
                  "?delivered=yes", "?delivered=no&p=3", f"?state=leased&seq__gte={middle.pk}",
                  f"?q={middle.pk}", f"?q={uuid.uuid4()}", "?q=ffff", f"?q={'f' * 12}",
                  f"?q={middle.id}&state=ready"):  # fmt: skip
        assert_bounded(operator, listing + query)
    for page in ("change", "body", "history", "delete"):
        assert_bounded(operator, url(Leased, page, middle.pk))
    text = assert_bounded(operator, listing).content.decode()
    assert "500+ messages" in text
    assert "Select all 500+ messages" in text


def test_a_message_in_the_middle_is_found_by_its_id_and_by_its_beginning(operator: Client, middle: Leased) -> None:
    for term in (str(middle.id), str(middle.id)[:23], middle.id.hex[:14]):
        found = assert_bounded(operator, url(Leased) + f"?q={term}").context["cl"].result_list
        assert middle.pk in [row.pk for row in found], term


def test_a_filter_looks_at_one_window_and_leads_on_to_the_next(operator: Client, middle: Leased) -> None:
    Leased.objects.filter(pk=middle.pk).update(deliveries=1)
    address, found, windows = url(Leased) + "?delivered=yes", [], 0
    while not found:
        cl = assert_bounded(operator, address).context["cl"]
        found, windows = [row.pk for row in cl.result_list], windows + 1
        address = url(Leased) + cl.further
    assert (found, windows) == ([middle.pk], 16)
    text = operator.get(url(Leased) + "?delivered=yes").content.decode()
    assert "This filter has read 5000 messages" in text


def test_the_list_goes_on_behind_its_deepest_page(operator: Client, middle: Leased) -> None:
    cl = assert_bounded(operator, url(Leased) + "?p=6").context["cl"]
    last = cl.result_list[-1].pk
    following = assert_bounded(operator, url(Leased) + cl.further).context["cl"]
    assert following.result_list[0].pk == last
    assert f"This list starts at seq {last}" in operator.get(url(Leased) + cl.further).content.decode()
    assert operator.get(url(Leased) + following.from_the_beginning).context["cl"].result_list[0].pk < last


def test_priorities_of_a_large_queue(operator: Client) -> None:
    fill(Urgent)
    for query in ("", "?priority=2", "?priority=2&p=5", "?priority=0&state=leased"):
        assert_bounded(operator, url(Urgent) + query)


def test_overview_of_large_tables(operator: Client) -> None:
    for model in (Leased, DelayedMessage, PoisonMessage):
        fill(model)
    SnapshotRecorder("default", list(registry.queues)).record()
    with CaptureQueriesContext(connection) as captured:
        response = assert_bounded(operator, url(QueueControl))
    asked = [query for query in captured if "SAVEPOINT" not in query["sql"] and "EXPLAIN" not in query["sql"]]
    assert len(asked) <= 15, "a constant number, with a snapshot"
    line = next(row["row"] for row in response.context["lines"] if row["row"].label == "testapp.Leased")
    assert (line.waiting, line.delayed, line.poison) == ("about 150,000", "10,000+", "10,000+")


def test_pages_of_many_delayed_messages(operator: Client) -> None:
    fill(DelayedMessage)
    message = DelayedMessage.objects.order_by("number")[ROWS // 2]
    for query in ("", "?p=5", "?o=-1", "?destination=testapp.Short", "?when=overdue", "?when=week&p=3",
                  f"?q={message.message_id}", "?q=ffff", f"?q={message.pk}"):  # fmt: skip
        assert_bounded(operator, url(DelayedMessage) + query)
    cl = operator.get(url(DelayedMessage) + "?destination=testapp.Short").context["cl"]
    assert_bounded(operator, url(DelayedMessage) + cl.further)


def test_pages_of_many_poison_messages(operator: Client) -> None:
    fill(PoisonMessage)
    message = PoisonMessage.objects.order_by("number")[ROWS // 2]
    for query in ("", "?p=5", "?o=1", "?status=all", "?status=archived", "?queue=testapp.Leased", "?group=a",
                  "?exception=ValueError", "?exception=KeyError", f"?q={message.message_id}", "?q=ffff",
                  "?status=all&p=4", "?queue=testapp.Short", "?group=b"):  # fmt: skip
        assert_bounded(operator, url(PoisonMessage) + query)
