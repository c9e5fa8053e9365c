"""Every page of the admin takes at most 15 statements, and none that takes too long."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.test import Client

from queueapp import registry
from queueapp.admin import databases, operations
from queueapp.models import PoisonMessage, QueueControl
from queueapp.operations.snapshots import SnapshotRecorder
from tests.benchmarks.console import fill, measure, pages
from tests.databases import only_on_postgresql
from tests.testapp.models import Leased

from .conftest import notes, url

MAX_STATEMENTS = 15


def test_every_page_takes_at_most_15_statements(
    operator: Client, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.QUEUEAPP = {"JOURNAL": {"^journaled": None}, "ALERTS": {"max_age": timedelta(minutes=1)}}
    monkeypatch.setattr(operations, "IN_REQUEST", 5)
    fill(Leased, 500)
    SnapshotRecorder("default", list(registry.queues)).record(lambda: True)
    counted = {page.name: measure(operator, page, runs=1)[0] for page in pages(Leased)}
    assert {name: count for name, count in counted.items() if count > MAX_STATEMENTS} == {}


@only_on_postgresql
def test_a_page_whose_statement_takes_too_long_is_a_note(operator: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(databases, "STATEMENT_MS", 50)
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE queueapp_poisonmessage RENAME TO poison_behind_a_view")
        cursor.execute(
            "CREATE VIEW queueapp_poisonmessage AS SELECT m.* FROM poison_behind_a_view m, (SELECT pg_sleep(5)) AS slow"
        )
    try:
        response = operator.get(url(PoisonMessage))
        assert response.headers["Location"] == url(QueueControl)
    finally:
        with connection.cursor() as cursor:
            cursor.execute("DROP VIEW queueapp_poisonmessage")
            cursor.execute("ALTER TABLE poison_behind_a_view RENAME TO queueapp_poisonmessage")
    [note] = notes(operator.get(url(QueueControl)))
    assert "a statement took longer than" in note
