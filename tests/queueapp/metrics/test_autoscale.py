"""The desired number of workers over HTTP."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth.models import Permission
from django.db import connection
from django.test import Client

from queueapp.registry import queues
from tests.testapp.models import Leased, Short

from .conftest import TOKEN

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("anew")]


def ask(query: str, token: str = TOKEN) -> Any:
    return Client().get(f"/autoscale{query}", headers={"authorization": f"Bearer {token}"})


def test_it_returns_the_sum_and_each_queue() -> None:
    Leased.send_many(range(5))
    Short.send_many(range(3))

    both = ask("?queue=testapp.Leased&queue=testapp.Short&per-worker=2&max=4&late=60").json()
    assert both["desired"] == 5
    assert {item["queue"]: (item["waiting"], item["desired"]) for item in both["queues"]} == {
        "testapp.Leased": (5, 3), "testapp.Short": (3, 2),
    }  # fmt: skip
    assert ask("?queue=testapp_leased&per-worker=2&max=2").json()["desired"] == 2
    everything = ask("?per-worker=2").json()
    assert {item["queue"] for item in everything["queues"]} == {queue._meta.label for queue in queues}, (
        "and nothing else"
    )
    assert all(item["error"] for item in everything["queues"] if item["desired"] is None), "tables of another project"


def test_what_is_not_known_is_no_number() -> None:
    with connection.schema_editor() as editor:
        editor.alter_db_table(Short, Short._meta.db_table, "elsewhere")
    try:
        answer = ask("?queue=testapp.Short")
        assert (answer.status_code, answer.json()["desired"]) == (503, None)
        assert ask("?queue=testapp.Leased").json()["desired"] == 0
    finally:
        with connection.schema_editor() as editor:
            editor.alter_db_table(Short, "elsewhere", Short._meta.db_table)


@pytest.mark.parametrize(
    ("query", "status", "words"),
    [
        ("?per_worker=5", 400, "per_worker = '5' is not accepted: it must be one of queue, per-worker, late, min, max"),
        ("?per-worker=0", 400, "from 1 to 1000000"),
        ("?per-worker=nan", 400, "a whole number"),
        ("?late=0", 400, "late"),
        ("?late=99999999999", 400, "a whole number"),
        ("?min=5&max=2", 400, "min, max"),
        ("?max=-1", 400, "a whole number"),
        ("?queue=testapp.NoSuchQueue", 404, "testapp.NoSuchQueue"),
        ("?queue=", 404, "queue"),
    ],
)
def test_what_is_not_accepted_is_reported(query: str, status: int, words: str) -> None:
    answer = ask(query)
    assert (answer.status_code, words in answer.content.decode()) == (status, True), answer.content


def test_it_needs_the_permission_to_read_metrics(django_user_model: Any) -> None:
    user = django_user_model.objects.create_user("looker", password="x", is_staff=True)
    client = Client()
    client.force_login(user)

    assert ask("", token="another").status_code == 401
    assert client.get("/autoscale").status_code == 403
    user.user_permissions.add(Permission.objects.get(codename="view_queuecontrol"))
    assert client.get("/autoscale?queue=testapp.Leased").status_code == 200
    assert client.post("/autoscale").status_code == 405
