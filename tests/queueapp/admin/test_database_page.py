"""The page of the databases: who holds back vacuum, how large the tables are, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, connections
from django.test import Client

from queueapp.admin import database_page
from queueapp.models import QueueControl
from queueapp.sql import backend_of
from queueapp.sql.database_health import TableHealth
from tests.databases import only_on_postgresql
from tests.testapp.models import Leased

from .conftest import url

pytestmark = [pytest.mark.django_db(transaction=True), only_on_postgresql]


def database(client: Client) -> dict[str, Any]:
    response = client.get(url(QueueControl, "databases"))
    assert response.status_code == 200
    return next(row for row in response.context["databases"] if row["alias"] == "default")


def test_an_open_transaction_is_named_with_what_to_do(operator: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    assert database(operator)["advice"] == []
    monkeypatch.setattr(database_page, "LONG", timedelta(0))
    second = connections.create_connection("default")
    try:
        second.set_autocommit(False)
        with second.cursor() as cursor:
            cursor.execute("SELECT count(*) FROM testapp_leased")
            process = second.connection.info.backend_pid
        found = database(operator)
    finally:
        second.close()
    assert str(process) in str([holder["name"] for holder in found["holders"]])
    assert any(f"pg_terminate_backend({process})" in text for text in found["advice"])


def test_tables_have_their_size(operator: Client) -> None:
    Leased.send_many({"n": n} for n in range(1000))
    found = {table["table"]: table for table in database(operator)["tables"]}
    assert found["testapp_leased"]["size"].endswith("iB")
    (health,) = backend_of(connection).health.tables(connection, ["testapp_leased", "no such table"])
    assert health.table_bytes > 8192


def test_a_table_of_dead_rows_has_advice() -> None:
    bloated = TableHealth("t", 10, 200_000, 1, 1, None)
    assert "VACUUM" in database_page.advice_on_table(bloated)
    assert database_page.advice_on_table(bloated._replace(rows=190_000)) == ""
    assert database_page.advice_on_table(bloated._replace(dead_rows=None)) == ""


def test_only_users_of_the_overview_see_it(staff: Callable[..., Client]) -> None:
    assert staff("testapp.view_leased").get(url(QueueControl, "databases")).status_code == 403
    assert staff("queueapp.view_queuecontrol").get(url(QueueControl, "databases")).status_code == 200
