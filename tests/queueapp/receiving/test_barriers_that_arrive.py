"""Barriers and what enters a queue in a batch of rows, out of the journal and from another database; and who receives
by hand."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from django.db import connections, transaction

from queueapp.messages import new_id
from queueapp.models import BarrierDelivery
from queueapp.receiving import barriers
from queueapp.sql import queue_sql
from queueapp.sql.message_columns import Row
from tests.databases import DATABASES, marks_of
from tests.testapp.ordering import Fenced

pytestmark = pytest.mark.parametrize(
    "alias", [pytest.param(alias, id=name, marks=marks_of(alias)) for name, alias in DATABASES.items()]
)


def insert_rows(alias: str, *rows: tuple[bytes, bool]) -> None:
    """As a queue is filled from the journal, or as what is due arrives from another database."""
    connection = connections[alias]
    part = [Row(0, new_id(), "{}", body, is_barrier=is_barrier) for body, is_barrier in rows]
    queue_sql(Fenced, connection).inserts.insert_rows(connection, part)


def waits(alias: str, step: Callable[[], Any]) -> None:
    """That a step beside the caller's open transaction waits until that is over; the caller ends it then."""
    done = threading.Event()

    def run() -> None:
        try:
            step()
            done.set()
        finally:
            connections[alias].close()

    thread = threading.Thread(target=run)
    with transaction.atomic(using=alias):
        insert_rows(alias, (b"1", False))
        thread.start()
        assert not done.wait(0.3), "the barrier has to come behind what was inserted before it"
    thread.join(20)
    assert done.is_set()


def test_barrier_comes_behind_rows_of_an_open_transaction(alias: str) -> None:
    waits(alias, lambda: Fenced.send({}, is_barrier=True, using=alias))
    assert list(Fenced.objects.using(alias).order_by("seq").values_list("is_barrier", flat=True)) == [False, True]


def test_barrier_among_such_rows_waits_for_open_sends(alias: str) -> None:
    def arrive() -> None:
        with transaction.atomic(using=alias):
            insert_rows(alias, (b"2", False), (b"3", True))

    waits(alias, arrive)
    assert list(Fenced.objects.using(alias).order_by("seq").values_list("is_barrier", flat=True)) == [
        False,
        False,
        True,
    ]


def test_barrier_that_receive_could_not_take_is_taken_by_the_same_client(alias: str) -> None:
    """It died between the release and its own taking; without maintenance no other process would delete it."""
    client = uuid.uuid4()
    Fenced.send({"n": 1}, is_barrier=True, using=alias)
    Fenced.send({"n": 2}, using=alias)
    assert barriers.release(Fenced, alias, extra_owner=client) == 1

    with Fenced.receive(client=client, using=alias) as batch:
        assert [item.is_barrier for item in batch] == [True]
    with Fenced.receive(client=client, using=alias) as batch:
        for message in batch:
            assert message.body == {"n": 2}
            message.ack()
    assert not Fenced.objects.using(alias).exists()
    assert not BarrierDelivery.objects.using(alias).exists()
