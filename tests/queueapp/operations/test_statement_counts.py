"""Commands over all queues send the database as many statements for many queues as for few."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from queueapp import registry
from queueapp.checks import check_served
from queueapp.checks.queues import check_tables_in
from queueapp.operations import subscriptions
from queueapp.operations.statistics import backlogs, queue_stats, subscribed_consumers
from tests.databases import only_on_postgresql
from tests.protocol_trace import statements
from tests.queueapp.management.test_first_hour import without_table
from tests.testapp.models import Addressed, AddressedUrgent, Leased, Short, Transactional

pytestmark = [pytest.mark.django_db, only_on_postgresql]
FEW = [Leased, Short, Transactional]


def many() -> list[Any]:
    return [queue for queue in registry.queues if queue._meta.managed]


def count(run: Callable[[], Any]) -> int:
    """How many statements reach the server, beneath every cursor."""
    with statements() as sent:
        run()
    return len(sent)


def command(name: str, *arguments: str) -> Any:
    out = io.StringIO()
    call_command(name, *arguments, stdout=out, stderr=io.StringIO())
    return json.loads(out.getvalue())


def autoscale(*labels: str) -> dict[str, Any]:
    out = io.StringIO()
    with suppress(CommandError):  # the tables of two foreign queues are missing here
        call_command("autoscale", *labels, stdout=out)
    return {scale["queue"]: scale for scale in json.loads(out.getvalue())}


def test_autoscale_asks_as_often_for_many_queues_as_for_few() -> None:
    Leased.send_many(range(5))
    counted = []
    for queues in (FEW, many()):
        labels = [queue._meta.label for queue in queues]
        counted.append(count(lambda labels=labels: autoscale(*labels)))
    assert counted[0] == counted[1] < 30, counted

    found = {label: scale["waiting"] for label, scale in autoscale().items()}
    assert found == {stats.queue: stats.waiting for stats in queue_stats(registry.queues)}
    assert found["testapp.Leased"] == 5


def test_listconsumers_asks_as_often_for_many_consumers_as_for_few() -> None:
    counted = []
    for queue, names in ((Addressed, ["a"]), (AddressedUrgent, ["a", "b", "c", "d", "e"])):
        for name in names:
            subscriptions.subscribe(queue, name, "testapp.Kind")
        counted.append(count(lambda: command("listconsumers", "--json")))
    assert counted[0] == counted[1] < 30, counted

    Addressed.send({}, recipient="a")
    AddressedUrgent.send({}, recipient="b", priority=1)
    found = {(row["queue"], row["consumer"]): row["waiting"] for row in command("listconsumers", "--json")}
    assert found == {("testapp.Addressed", "a"): 1} | {
        ("testapp.AddressedUrgent", name): int(name == "b") for name in "abcde"
    }


def test_the_check_of_the_tables_asks_as_often_for_many_as_for_few() -> None:
    check_tables_in("default", FEW)
    counted = [count(lambda q=queues: check_tables_in("default", q)) for queues in (FEW, many())]
    assert counted[0] == counted[1] < 30, counted


def test_the_check_of_consumers_asks_as_often_for_many_consumers_as_for_few() -> None:
    counted = []
    for names in ("a", "bcdef"):
        for name in names:
            subscriptions.subscribe(Addressed, name, "testapp.Kind")
        counted.append(count(lambda: check_served(databases=["default"])))
    assert counted[0] == counted[1] < 30, counted


def test_a_table_that_cannot_be_read_leaves_the_others_known() -> None:
    Leased.send({})
    subscriptions.subscribe(Addressed, "a", "testapp.Kind")
    with without_table(Short), without_table(AddressedUrgent):
        subscriptions.subscribe(AddressedUrgent, "b", "testapp.Kind")
        leased, short = backlogs([Leased, Short])
        with pytest.raises(CommandError):
            command("autoscale", "testapp.Short")
        addressed, urgent = subscribed_consumers([Addressed, AddressedUrgent])
    assert (leased.waiting, short.waiting, leased.error) == (1, None, "")
    assert "the table does not exist" in short.error
    assert [consumer.waiting for consumer in addressed.consumers] == [0]
    assert "the table does not exist" in urgent.error
