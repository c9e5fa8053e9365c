"""What the ORM reads of tables of messages: under the hints of a look on SQL Server, without a wait for locks on any
database."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.auth.models import AnonymousUser
from django.db import connections
from django.db.models import F, Max, QuerySet, sql
from django.test import RequestFactory
from sqlglot import exp

from queueapp import delayed
from queueapp.admin.message_pages import MessageAdmin
from queueapp.models import DelayedMessage, Now, PoisonMessage
from queueapp.operations.statistics import queue_stats
from queueapp.sql import nonblocking, queue_sql
from queueapp.sql.sqlserver.statements import LOOKING
from tests.queueapp.sql.server import ALL, Server, within
from tests.queueapp.sql.tsql import Recorder, hints, never_connected, parsed
from tests.testapp.models import Leased, Readable, Transactional

LOOK = set(LOOKING.split(", "))


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    """What reaches the SQL Server "recorded", which is not there."""
    recorder = Recorder()
    connections["recorded"] = never_connected(recorder)
    yield recorder
    del connections["recorded"]


def sent(read: Callable[[QuerySet[Any]], Any], rows: QuerySet[Any], recorder: Recorder) -> Any:
    """The one statement of a read, parsed."""
    read(rows.using("recorded"))
    ((statement,),) = (parsed(statement.sql) for statement in recorder.statements)
    recorder.statements.clear()
    return statement


READS: dict[str, Callable[[QuerySet[Any]], Any]] = {
    "rows": list,
    "filtered before and after": lambda rows: list(rows.filter(pk__gt=1).exclude(pk=5).order_by("-pk")[:5]),
    "count": lambda rows: rows.count(),
    "capped count": lambda rows: rows.order_by()[:100].count(),
    "exists": lambda rows: rows.filter(pk=1).exists(),
    "first": lambda rows: rows.values_list("pk", flat=True).first(),
    "aggregate": lambda rows: rows.aggregate(last=Max("pk")),
    "annotated": lambda rows: list(rows.annotate(next=F("pk") + 1).values("next")),
    "by page": lambda rows: list(rows.order_by("pk")[20:40]),
}


@pytest.mark.parametrize("rows", [Leased.objects.all(), Readable.objects.filter(pk__gt=0), PoisonMessage.objects.order_by("queue")],  # noqa: E501
                         ids=["all", "odd name", "filtered before"])  # fmt: skip
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_every_read_has_the_hints_of_a_look(
    read: Callable[[QuerySet[Any]], Any], rows: QuerySet[Any], recorder: Recorder
) -> None:
    statement = sent(read, nonblocking(rows), recorder)

    assert list(hints([statement])) == [(rows.model._meta.db_table, LOOK)]


def test_rows_that_were_not_looked_at_have_none(recorder: Recorder) -> None:
    rows = Leased.objects.filter(pk=1)
    nonblocking(rows)

    statement = sent(list, rows, recorder)

    assert list(hints([statement])) == []


def test_rows_within_another_query_keep_the_hints(recorder: Recorder) -> None:
    rows = PoisonMessage.objects.filter(number__in=nonblocking(DelayedMessage.objects.filter(pk__lt=9)).values("pk"))

    statement = sent(list, rows, recorder)

    assert list(hints([statement])) == [(DelayedMessage._meta.db_table, LOOK)]


def test_what_locks_or_changes_rows_takes_no_hint_of_a_look() -> None:
    rows = nonblocking(PoisonMessage.objects.filter(queue="a"))
    locking, update, delete = (
        rows.select_for_update(skip_locked=True).query,
        rows.query.chain(sql.UpdateQuery),
        rows.query.chain(sql.DeleteQuery),
    )
    update.add_update_values({"reason": "b"})
    connection = never_connected(Recorder())
    connection.autocommit = False
    found = []
    for query in (locking, update, delete):
        text, _ = query.get_compiler(connection=connection).as_sql()
        found.append(
            dict(
                hints(
                    [statement for statement in parsed(text.replace("%s", "?")) if not isinstance(statement, exp.Set)]
                )
            )
        )

    assert found == [{PoisonMessage._meta.db_table: {"ROWLOCK", "UPDLOCK", "READPAST"}}, {}, {}]


def pages() -> list[Any]:
    return [page for page in admin.site._registry.values() if isinstance(page, MessageAdmin)]


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.model.__name__)
def test_pages_of_the_admin_look(page: Any, recorder: Recorder) -> None:
    request = RequestFactory().get("/")
    request.user = AnonymousUser()

    for read in (list, lambda rows: rows.filter(pk=1).first()):
        statement = sent(read, page.get_queryset(request), recorder)
        assert list(hints([statement])) == [(page.model._meta.db_table, LOOK)]


# -- on the databases there are ----------------------------------------------------------------------------------------


def test_look_waits_for_no_open_transaction(server: Server) -> None:
    taken, free = server.put(Transactional, 2)
    handler = server.another()
    with server.rolled_back(handler):
        assert len(queue_sql(Transactional, handler).claims.claim_by_delete(handler, ALL, 1)) == 1
        with within():
            rows = nonblocking(Transactional.objects.using(server.alias))
            seen = set(rows.values_list("seq", flat=True))
            assert rows.count() == len(seen)

    assert seen in ({free}, {taken, free}), "SQL Server passes over it, PostgreSQL shows what was committed"
    assert set(server.seqs(Transactional)) == {taken, free}


def test_figures_wait_for_no_open_transaction(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("django.db.router.db_for_read", lambda model, **hints: server.alias)
    server.put(Transactional, 2)
    label = Transactional._meta.label
    DelayedMessage.objects.using(server.alias).create(message_id=uuid.uuid4(), destination=label, due=Now())
    PoisonMessage.objects.using(server.alias).create(message_id=uuid.uuid4(), queue=label)
    handler = server.another()
    with server.rolled_back(handler):
        queue_sql(Transactional, handler).claims.claim_by_delete(handler, ALL, 1)
        with handler.cursor() as cursor:
            for model in (DelayedMessage, PoisonMessage):
                key, table = model._meta.pk.column, handler.ops.quote_name(model._meta.db_table)
                cursor.execute(f"UPDATE {table} SET {handler.ops.quote_name('deliveries')} = 1 WHERE {key} > 0")
                assert cursor.rowcount == 1
        with within():
            (stats,) = queue_stats([Transactional])
            delayed.undeliverable(server.alias)

    assert stats.error == ""
    assert stats.waiting in (1, 2)
