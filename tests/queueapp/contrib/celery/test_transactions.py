"""Remote control and results inside of a transaction of the caller."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import TimeoutError
from django.db import connections, transaction

from queueapp.contrib.celery.models import BrokerQueue, CeleryResult
from queueapp.sending.isolation import outside_transaction

CONTROL = "w@host.celery.pidbox"


@pytest.fixture
def app(alias: str) -> Iterator[Celery]:
    app = Celery("transactions", broker=f"queueapp://{alias}", backend=f"queueapp://{alias}", set_as_current=False)
    with app.connection() as conn, conn.channel() as channel:
        channel.exchange_declare("celery.pidbox", "fanout")
        channel.queue_declare(CONTROL, auto_delete=True)
        channel.queue_bind(CONTROL, "celery.pidbox")
    yield app
    app.close()


def _commands(alias: str) -> int:
    return int(BrokerQueue.objects.using(alias).filter(recipient=CONTROL).count())


def test_a_command_in_a_transaction_is_sent_at_once(app: Celery, alias: str) -> None:
    with transaction.atomic(using=alias):
        app.control.revoke("a task")
        assert outside_transaction(alias, lambda: _commands(alias)) == 1
        transaction.set_rollback(True, using=alias)

    assert _commands(alias) == 1, "a rollback does not take it back"


def test_a_task_in_a_transaction_goes_with_it(app: Celery, alias: str) -> None:
    with transaction.atomic(using=alias):
        app.send_task("shop.bill")
        transaction.set_rollback(True, using=alias)

    assert not BrokerQueue.objects.using(alias).exclude(recipient=CONTROL).exists()


@pytest.mark.parametrize("isolation", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
def test_a_result_is_seen_from_a_transaction(app: Celery, alias: str, isolation: str) -> None:
    if connections[alias].vendor != "postgresql":
        pytest.skip("sets the level of one transaction, as PostgreSQL has it")

    def end() -> None:
        app.backend.store_result("task", 7, "SUCCESS")

    with transaction.atomic(using=alias):
        with connections[alias].cursor() as cursor:
            cursor.execute(f"SET TRANSACTION ISOLATION LEVEL {isolation}")
        assert not CeleryResult.objects.using(alias).exists()
        with pytest.raises(TimeoutError):
            app.AsyncResult("task").get(timeout=0.1)

        outside_transaction(alias, end)

        assert app.AsyncResult("task").get(timeout=5) == 7
        assert app.AsyncResult("task").status == "SUCCESS"


def test_a_result_of_the_open_transaction_is_seen(app: Celery, alias: str) -> None:
    with transaction.atomic(using=alias):
        app.backend.store_result("own", 7, "SUCCESS")
        result: Any = app.AsyncResult("own").get(timeout=5)
        transaction.set_rollback(True, using=alias)

    assert result == 7
