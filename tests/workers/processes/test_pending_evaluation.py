"""What others insert into a queue with expressions is evaluated by the process tree, and reported by
``--until-empty``."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable

import pytest
from django.db import connection

from tests.testapp.models import Effect, LateFlights
from tests.workers.trees import Tree
from workers.processes.until_empty import remaining

Start = Callable[..., Tree]


def insert(*minutes: int) -> None:
    with connection.cursor() as cursor:
        for minute in minutes:
            row = [str(uuid.uuid4()), "{}", json.dumps({"minutes": minute}).encode()]
            cursor.execute(f"INSERT INTO {LateFlights._meta.db_table} (id, headers, body) VALUES (%s, %s, %s)", row)


def test_a_tree_evaluates_what_others_insert(start_tree: Start) -> None:
    insert(5, 25)
    LateFlights.send({"minutes": 35})
    tree = start_tree("testapp.LateFlights", "--until-empty")

    assert tree.wait() == 0
    assert sorted(Effect.objects.values_list("name", flat=True)) == ["late 25", "late 35"]
    assert "testapp.LateFlights: dropped 1 inserted message that the queue's filter does not accept" in tree.output


@pytest.mark.django_db
def test_pending_messages_are_left_and_unroutable_where_no_process_evaluates_them() -> None:
    insert(25)
    assert remaining([LateFlights], runs_maintenance=True)[:2] == ("testapp.LateFlights: 1 pending evaluation", False)
    rest = remaining([LateFlights], runs_maintenance=False)
    assert rest[:2] == (
        "testapp.LateFlights: 1 pending evaluation, no process of this tree evaluates pending messages",
        True,
    )
