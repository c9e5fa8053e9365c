"""``make console-speed``: statements and server time of each page of the admin, on tables of many rows.

Prints a table in Markdown. One queue has ``--rows`` messages, the poison table a fifth of them, the journal and the
delayed messages a hundredth; ``--queues`` further queues are empty. The time is that of Django's test client in this
process, with the database beside it: the median of five requests after a first one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import uuid
from collections.abc import Callable
from datetime import timedelta
from time import perf_counter
from typing import Any, NamedTuple
from urllib.parse import urlencode

GROUP = "a" * 32


class Page(NamedTuple):
    """A page, and what is posted to it (None: it is got)."""

    name: str
    address: str
    data: dict[str, Any] | None = None
    headers: dict[str, str] = {}


def pages(queue: Any) -> list[Page]:
    """The pages of the console, for a queue with messages and poison of ``GROUP``."""
    from queueapp.models import DelayedMessage, JournalEntry, PoisonMessage

    def list_of(model: Any) -> str:
        return f"/admin/{model._meta.app_label}/{model._meta.model_name}/"

    label, overview = queue._meta.label, "/admin/queueapp/queuecontrol/"
    keys = queue.objects.order_by("pk").values_list("pk", flat=True)
    first, newest = keys[0], queue.objects.order_by("-pk").values_list("pk", flat=True)[0]
    poison, delayed = PoisonMessage.objects.order_by("-pk")[0], DelayedMessage.objects.order_by("-pk")[0]
    messages, buried = list_of(queue), list_of(PoisonMessage)
    requeue = {"action": "requeue", "_selected_action": poison.pk, "select_across": "1"}
    return [
        Page("overview", overview),
        Page("overview, its refresh", overview, None, {"X-Queueapp-Part": "rows"}),
        Page("charts of a queue", f"{overview}{label}/charts/"),
        Page("messages of a queue", messages),
        Page("messages, from the middle", f"{messages}?seq__gte={(first + newest) // 2}"),
        Page("messages, the deepest page", f"{messages}?p={min(100, (newest - first + 1) // 100)}"),
        Page("messages, filter by state", f"{messages}?state=leased"),
        Page("messages, filter by age", f"{messages}?age=week"),
        Page("messages, search by an id", f"{messages}?q={queue.objects.get(pk=newest).id}"),
        Page("one message", f"{messages}{(first + newest) // 2}/change/"),
        Page("search of everything by a value in the body", f"{overview}search/?q=order%3D4711"),
        Page("poison, with groups", buried),
        Page("poison, one group", f"{buried}?group={GROUP}"),
        Page("poison, filter by attempts", f"{buried}?attempts=5"),
        Page("one poison message", f"{buried}{poison.pk}/change/"),
        Page("confirmation: requeue a group", f"{buried}?group={GROUP}", requeue),
        Page("delayed messages", list_of(DelayedMessage)),
        Page("one delayed message", f"{list_of(DelayedMessage)}{delayed.pk}/change/"),
        Page("journal", list_of(JournalEntry)),
        Page("workers", "/admin/queueapp/subscriber/"),
        Page("operations", "/admin/queueapp/bulkoperation/"),
        Page("schedules", "/admin/queueapp/schedule/"),
        Page("alerts", "/admin/queueapp/alert/"),
        Page("databases", f"{overview}databases/"),
    ]


def fill(queue: Any, rows: int) -> None:
    """The rows, made by the server."""
    from django.db import connection

    from queueapp import publish
    from queueapp.models import BulkOperation, DelayedMessage, JournalEntry, Now, PoisonMessage, Subscriber
    from tests.bulk_rows import fill_up

    fill_up(queue(id=uuid.uuid4(), headers='{"type": "shop.Order"}', body=b'{"order": 1}'), rows)
    failed = {"reason": "ValueError: no gate", "exception_type": "ValueError", "headers": "{}", "body": b"{}"}
    for group, share in ((GROUP, 10), ("b" * 32, 10)):
        poison = PoisonMessage(queue=queue._meta.label, message_id=uuid.uuid4(), group_key=group, attempts=3, **failed)
        fill_up(poison, max(2, rows // share))
    later = DelayedMessage(
        message_id=uuid.uuid4(), destination=queue._meta.label, due=Now() + timedelta(hours=1), headers="{}"
    )
    fill_up(later, max(2, rows // 100))
    publish("journaled.orders", {"order": 1})
    fill_up(JournalEntry(topic="journaled.orders", txid=1, message_id=uuid.uuid4()), max(2, rows // 100))
    BulkOperation.objects.create(action="requeue", source="queueapp.PoisonMessage", first=1, last=9, cursor=4)
    for process in range(20):
        Subscriber.objects.create(
            queue=queue._meta.label, host="worker-1", process=process, supervisor=uuid.uuid4(),
            alive_until=Now() + timedelta(hours=1),
        )  # fmt: skip
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE")


def further_queues(count: int) -> list[Any]:
    """So many further queues, with their tables."""
    from django.contrib import admin
    from django.db import connection

    from queueapp import Queue
    from queueapp.admin.queues import QueueAdmin

    made = []
    for number in range(count):
        queue = type(Queue)(f"Further{number}", (Queue,), {"__module__": "tests.testapp.models"})
        with connection.schema_editor() as editor:
            editor.create_model(queue)
        admin.site.register(queue, QueueAdmin)
        made.append(queue)
    return made


def measure(client: Any, page: Page, runs: int = 5) -> tuple[int, float]:
    """The statements of a page, and the median of its seconds."""
    from django.db import connection
    from django.test.utils import CaptureQueriesContext

    ask: Callable[[], Any] = (
        (lambda: client.get(page.address, headers=page.headers))
        if page.data is None
        else (lambda: client.post(page.address, page.data))
    )
    with CaptureQueriesContext(connection) as captured:
        response = ask()
    assert response.status_code == 200, (page, response.status_code, response.headers)
    # Before the next request, which resets what was captured.
    statements = len([query for query in captured if "SAVEPOINT" not in query["sql"]])
    seconds = []
    for _ in range(runs):
        began = perf_counter()
        ask()
        seconds.append(perf_counter() - began)
    return statements, statistics.median(seconds)


def measure_search(client: Any, address: str) -> str:
    """A search to its end: how many responses, the most statements and the longest time of one, and the time of all."""
    from django.db import connection
    from django.test.utils import CaptureQueriesContext

    statements, seconds, further = [], [], address
    while further:
        with CaptureQueriesContext(connection) as captured:
            began = perf_counter()
            response = client.get(further)
            seconds.append(perf_counter() - began)
        statements.append(len([query for query in captured if "SAVEPOINT" not in query["sql"]]))
        found = response.context["further"]
        further = found and address.partition("?")[0] + found
    limits = f"at most {max(statements)} statements and {1000 * max(seconds):,.0f} ms each"
    return f"{len(seconds)} responses, {limits}, {sum(seconds):.1f} s in all: {response.context['progress']}"


def main() -> None:
    """Fill a test database, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.console", description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000, help="messages of the queue (default 1000000)")
    parser.add_argument("--queues", type=int, default=200, help="further queues (default 200)")
    arguments = parser.parse_args()
    os.environ["DJANGO_SETTINGS_MODULE"] = "tests.settings"
    import django

    django.setup()
    from django.contrib.auth.models import User
    from django.test import Client
    from django.test.runner import DiscoverRunner

    from queueapp import registry
    from queueapp.operations.snapshots import SnapshotRecorder
    from tests.testapp.models import Leased

    runner = DiscoverRunner(verbosity=0, interactive=False)
    runner.setup_test_environment()
    databases = runner.setup_databases()
    try:
        further_queues(arguments.queues)
        began = perf_counter()
        fill(Leased, arguments.rows)
        SnapshotRecorder("default", list(registry.queues)).record(lambda: True)
        count = len(list(registry.queues))
        print(f"{arguments.rows:,} messages, {2 * (arguments.rows // 10):,} poison, {count} queues; "
              f"made in {perf_counter() - began:.0f} s\n")  # fmt: skip
        client = Client()
        client.force_login(User.objects.create_superuser("admin", password=uuid.uuid4().hex))
        print("| page | statements | ms |\n| --- | --- | --- |")
        for page in pages(Leased):
            statements, seconds = measure(client, page)
            print(f"| {page.name} | {statements} | {seconds * 1000:,.0f} |", flush=True)
        print()
        for query in ("order=4711", "nothing", "header:tenant=acme", "error:nothing"):
            address = f"/admin/queueapp/queuecontrol/search/?{urlencode({'q': query})}"
            print(f"search of everything by {query}: {measure_search(client, address)}", flush=True)
    finally:
        runner.teardown_databases(databases)
        runner.teardown_test_environment()


if __name__ == "__main__":
    main()
