"""A rehearsal says what a handler would do, and nothing of it stays.

``QUEUEAPP_REHEARSALS`` has how often the handler that writes most is rehearsed: once in the suite.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import uuid
from contextlib import suppress
from datetime import timedelta
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import IntegrityError, connection, transaction
from django.db.models.sql import DeleteQuery, InsertQuery, UpdateQuery

from queueapp import BatchContext, Context, QueueError, RehearsalRefused, consumer, rehearse, set_consumer
from queueapp.models import DelayedMessage, PoisonMessage
from queueapp.operations.rehearsal import RowsChanged, rows_changed_by
from tests.databases import only_on_postgresql
from tests.in_process_worker import real_commits
from tests.queueapp.sql.tsql import Recorder, never_connected
from tests.testapp.messages import Ping
from tests.testapp.models import Addressed, AtMostOnce, Effect, ForeignPostgres, InSets, Leased, Transactional

pytestmark = real_commits


def checksums() -> dict[str, Any]:
    """Of the rows of all tables."""
    found = {}
    with connection.cursor() as cursor:
        for table in sorted(connection.introspection.table_names()):
            name = connection.ops.quote_name(table)
            cursor.execute(
                f"SELECT count(*), md5(coalesce(string_agg(t::text, '|' ORDER BY t::text), '')) FROM {name} t"
            )
            found[table] = cursor.fetchone()
    return found


@pytest.fixture(params=[Leased, Transactional, AtMostOnce], ids=lambda queue: queue.__name__)
def queue(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def handled_by(no_consumers: None) -> Any:
    """Registers a handler of untyped messages as the only one of a queue."""

    def register(queue: Any, handler: Any, **options: Any) -> None:
        consumer(queue, name=f"rehearsed {queue.__name__}", **options)(handler)

    return register


def poison(queue: Any, body: Any = None, **columns: Any) -> PoisonMessage:
    headers = '{"content-type": "application/json"}'
    return PoisonMessage.objects.create(
        message_id=uuid.uuid4(), queue=queue._meta.label, reason="tests", headers=headers,
        body=json.dumps(body if body is not None else {}).encode(), deliveries=3, **columns,
    )  # fmt: skip


def writes_and_sends(message: dict[str, Any], context: Context) -> None:
    """What a handler may do with the database."""
    Effect.objects.create(name="one")
    Effect.objects.create(name="two")
    Effect.objects.filter(name="two").update(detail="changed")
    Effect.objects.filter(name="before").delete()
    Leased.send(Ping("sent"))
    Leased.send_many([{"n": 1}, {"n": 2}])
    Transactional.send({"later": 1}, delay=timedelta(hours=1))
    Leased.send({"alone": 1}, isolated=True)
    transaction.on_commit(lambda: Effect.objects.create(name="hook"))
    context.extend()


def test_what_a_handler_does_is_reported_and_undone(queue: Any, handled_by: Any) -> None:
    handled_by(queue, writes_and_sends)
    Effect.objects.create(name="before")
    row = poison(queue, {"n": 1})
    before = checksums()

    for _ in range(int(os.environ.get("QUEUEAPP_REHEARSALS", "1"))):
        found = rehearse(row)
        assert found.succeeded, found.traceback

    assert found.consumer == f"rehearsed {queue.__name__}"
    assert found.rows["testapp_effect"] == RowsChanged(2, 1, 1)
    assert [message.queue for message in found.sent] == ["testapp.Leased"] * 4 + ["testapp.Transactional"]
    assert [message.delayed for message in found.sent] == [False] * 4 + [True]
    assert found.sent[0].headers["type"] == "tests.testapp.messages.Ping"
    assert found.hooks >= 1
    assert found.refused == []
    assert checksums() == before


def test_a_failure_is_reported_with_its_traceback(queue: Any, handled_by: Any) -> None:
    def fails(message: dict[str, Any]) -> None:
        Effect.objects.create(name="one")
        raise ValueError("today's bug")

    handled_by(queue, fails)
    before_and_row = poison(queue)
    before = checksums()

    found = rehearse(before_and_row)

    assert (type(found.error), str(found.error)) == (ValueError, "today's bug")
    assert "in fails" in found.traceback
    assert checksums() == before


def test_a_database_error_that_a_handler_catches_fails_as_in_its_queue(handled_by: Any) -> None:
    def catches(message: dict[str, Any]) -> None:
        taken = Effect.objects.create(name="one")
        try:
            Effect.objects.bulk_create([Effect(pk=taken.pk, name="two")])
        except IntegrityError:
            Effect.objects.create(name="three")
        with suppress(IntegrityError):
            Effect.objects.create(pk=taken.pk, name="four")

    handled_by(Leased, catches)
    handled_by(Transactional, catches)

    # With leases each statement is a transaction; in one transaction the first error breaks it.
    found = rehearse(poison(Leased))
    assert found.succeeded, found.traceback
    assert not rehearse(poison(Transactional)).succeeded
    assert not Effect.objects.exists()


def test_waiting_and_delayed_messages_and_edits_are_rehearsed_in_place(handled_by: Any) -> None:
    seen = []
    handled_by(Leased, lambda message: seen.append(message))
    Leased.send({"n": 1})
    Leased.send({"n": 2}, delay=timedelta(hours=1))
    before = checksums()

    assert rehearse(Leased.objects.get()).succeeded
    assert rehearse(DelayedMessage.objects.get()).succeeded
    assert rehearse(Leased.objects.get(), body=b'{"n": 3}').succeeded
    assert not rehearse(Leased.objects.get(), headers={"type": "shop.Unknown"}).succeeded

    assert seen == [{"n": 1}, {"n": 2}, {"n": 3}]
    assert checksums() == before


@pytest.mark.parametrize(
    "outside",
    [
        lambda: socket.create_connection(("127.0.0.1", 9), timeout=1),
        lambda: socket.getaddrinfo("example.org", 443),
        lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", 9)),
        lambda: subprocess.run([sys.executable, "-c", "print()"], check=True),
    ],
    ids=["connect", "look-up", "datagram", "program"],
)
def test_sockets_and_programs_are_refused(handled_by: Any, outside: Any) -> None:
    handled_by(Leased, lambda message: outside())

    found = rehearse(poison(Leased))

    assert isinstance(found.error, RehearsalRefused)
    assert len(found.refused) == 1
    with pytest.raises(ConnectionRefusedError):  # afterwards nothing is
        socket.create_connection(("127.0.0.1", 9), timeout=1)


def test_an_async_handler_is_refused_as_well_and_its_writes_are_undone(handled_by: Any) -> None:
    async def handler(message: dict[str, Any]) -> None:
        await Effect.objects.acreate(name="async")
        socket.create_connection(("127.0.0.1", 9), timeout=1)

    handled_by(Leased, handler)

    found = rehearse(poison(Leased))

    assert isinstance(found.error, RehearsalRefused)
    assert found.rows["testapp_effect"] == RowsChanged(1, 0, 0)
    assert not Effect.objects.exists()


def test_a_handler_may_use_the_network_where_that_is_asked_for(handled_by: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        handled_by(Leased, lambda message: socket.create_connection(address, timeout=5).close())

        assert rehearse(poison(Leased), network=True).succeeded


@pytest.mark.parametrize("statement", ["COMMIT", "commit;", " END", "ROLLBACK", "PREPARE TRANSACTION 'x'"])
def test_a_commit_is_refused(handled_by: Any, statement: str) -> None:
    def commits(message: dict[str, Any]) -> None:
        Effect.objects.create(name="one")
        with connection.cursor() as cursor:
            cursor.execute(statement)

    handled_by(Leased, commits)

    assert isinstance(rehearse(poison(Leased)).error, RehearsalRefused)
    assert not Effect.objects.exists()


def test_durable_blocks_and_savepoints_of_a_handler_work(handled_by: Any) -> None:
    def nests(message: dict[str, Any]) -> None:
        with transaction.atomic(durable=True):
            Effect.objects.create(name="one")
            with suppress(ZeroDivisionError), transaction.atomic():
                Effect.objects.create(name="two")
                _ = 1 / 0

    handled_by(Leased, nests)

    assert rehearse(poison(Leased)).succeeded
    assert not Effect.objects.exists()


@only_on_postgresql
def test_a_changed_session_is_undone_and_not_warned_of(handled_by: Any, caplog: pytest.LogCaptureFixture) -> None:
    def changes(message: dict[str, Any]) -> None:
        with connection.cursor() as cursor:
            cursor.execute("SET application_name = 'changed'")

    handled_by(Leased, changes)
    for _ in range(2):
        assert rehearse(poison(Leased)).succeeded
    assert caplog.records == []
    with connection.cursor() as cursor:
        cursor.execute("SHOW application_name")
        assert cursor.fetchone() != ("changed",)


def test_it_works_within_a_transaction_of_the_caller(handled_by: Any) -> None:
    handled_by(Leased, lambda message: Effect.objects.create(name="one"))
    hooks = []

    with transaction.atomic():
        Effect.objects.create(name="the caller's")
        transaction.on_commit(lambda: hooks.append(1))
        assert rehearse(poison(Leased)).rows["testapp_effect"] == RowsChanged(1, 0, 0)

    assert [item.name for item in Effect.objects.all()] == ["the caller's"]
    assert hooks == [1]


def test_batches_and_messages_for_one_of_several_consumers(handled_by: Any) -> None:
    def in_batches(messages: list[dict[str, Any]], context: BatchContext) -> None:
        Effect.objects.create(name=str(messages))

    handled_by(Leased, in_batches, batch=10)
    assert rehearse(poison(Leased, {"n": 1})).rows["testapp_effect"] == RowsChanged(1, 0, 0)

    handled_by(Addressed, lambda message: Leased.send(Ping("sent")))
    row = poison(Addressed, {"n": 1})
    assert rehearse(row, consumer="rehearsed Addressed").succeeded
    assert not rehearse(row, consumer="another").succeeded


def test_a_set_consumer_cannot_be_rehearsed(no_consumers: None) -> None:
    set_consumer(InSets, name="sets")(lambda messages: None)

    with pytest.raises(QueueError, match="set consumer"):
        rehearse(poison(InSets))


def test_many_rehearsals_leave_every_table_as_it_was(handled_by: Any) -> None:
    """A thousand, of handlers that succeed, fail, and break their transaction."""

    def by_number(message: dict[str, Any], context: Context) -> None:
        writes_and_sends(message, context)
        number = message["n"]
        if number % 5 == 1:
            raise RuntimeError("failed")
        if number % 5 == 2:
            with connection.cursor() as cursor:
                cursor.execute("SELECT 1 / 0")
        if number % 5 == 3:
            connection.close()

    queues = (Leased, Transactional, AtMostOnce)
    for queue in queues:
        handled_by(queue, by_number)
    rows = [poison(queues[n % 3], {"n": n}) for n in range(15)]
    before = checksums()

    results = [rehearse(rows[n % 15]).succeeded for n in range(150)]

    assert checksums() == before
    assert 45 < sum(results) <= 90


# -- the command -----------------------------------------------------------------------------------------------------


def command(*arguments: str) -> str:
    output = StringIO()
    try:
        call_command("rehearse", *arguments, stdout=output)
    except CommandError as error:
        output.write(f"error: {error}")
    return output.getvalue()


def test_the_command_reports_and_says_by_its_exit_code_what_fails(handled_by: Any, tmp_path: Path) -> None:
    def handler(message: dict[str, Any]) -> None:
        if message.get("bad"):
            raise ValueError("today's bug")
        Effect.objects.create(name="one")
        Leased.send({"n": 1})

    handled_by(Leased, handler)
    good, bad = poison(Leased, {}), poison(Leased, {"bad": 1})

    text = command(str(good.pk))
    assert "handled" in text
    assert "testapp_effect: 1 inserted, 0 updated, 0 deleted" in text
    assert "sent to testapp.Leased:" in text
    both = command("--queue", "testapp.Leased")
    assert "failed: ValueError: today's bug" in both
    assert "error: 1 message of 2 could not be handled." in both

    edited = tmp_path / "body"
    edited.write_text("{}")
    assert "error" not in command(str(bad.pk), "--body", str(edited))
    (found,) = map(json.loads, command(str(good.pk), "--json").splitlines())
    assert (found["succeeded"], found["rows"]["testapp_effect"]["inserted"]) == (True, 1)

    Leased.send({})
    assert "handled" in command("--waiting", "testapp.Leased")
    assert "error: Select" in command()
    assert "error: No message matches" in command("--delayed", "testapp.Leased")
    assert "error: --body and --headers are for one message" in command("--queue", "testapp.Leased", "--headers", "{}")


@only_on_postgresql
def test_a_message_to_a_foreign_queue_is_reported(handled_by: Any) -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            "CREATE TABLE foreign_postgres (id uuid NOT NULL, expires timestamp, headers text NOT NULL, body bytea, "
            "seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY)"
        )
    try:
        handled_by(Leased, lambda message: ForeignPostgres.send({"n": 1}))
        found = rehearse(poison(Leased))
    finally:
        with connection.cursor() as cursor:
            cursor.execute("DROP TABLE foreign_postgres")

    assert found.succeeded, found.traceback
    assert [message.queue for message in found.sent] == ["testapp.ForeignPostgres"]


def test_rows_are_counted_in_the_statements_of_the_orm_on_sql_server() -> None:
    """mssql-django writes SET NOCOUNT before each of them, and the driver does not count what it inserts so."""
    sql_server = never_connected(Recorder())

    def text_of(query: Any) -> str:
        compiled = query.get_compiler(connection=sql_server).as_sql()
        return str(compiled[0][0] if isinstance(compiled, list) else compiled[0])

    insert = InsertQuery(Effect)
    insert.insert_values(Effect._meta.local_concrete_fields[1:], [Effect(name="one")])
    one_row, many_rows = insert.get_compiler(connection=sql_server), text_of(insert)
    one_row.returning_fields = [Effect._meta.pk]
    update = Effect.objects.all().query.chain(UpdateQuery)
    update.add_update_values({"detail": "changed"})

    assert rows_changed_by(str(one_row.as_sql()[0][0]), -1) == ("testapp_effect", 0, 1)
    assert rows_changed_by(many_rows, 3) == ("testapp_effect", 0, 3)
    assert rows_changed_by(text_of(update), 2) == ("testapp_effect", 1, 2)
    assert rows_changed_by(text_of(Effect.objects.all().query.chain(DeleteQuery)), 4) == ("testapp_effect", 2, 4)
    assert rows_changed_by("SET NOCOUNT ON; INSERT INTO [q] ([id]) VALUES (?); SELECT @@ROWCOUNT", -1) == ("q", 0, 0)
    returned_by_the_database = (
        "SET NOCOUNT ON; IF OBJECT_ID('tempdb..#django_returning_insert') IS NOT NULL DROP TABLE "
        "#django_returning_insert; SELECT TOP 0 [id] INTO #django_returning_insert FROM [t]; INSERT INTO [t] ([a]) "
        "OUTPUT INSERTED.[id] INTO #django_returning_insert VALUES (?); SELECT [id] FROM #django_returning_insert"
    )
    assert rows_changed_by(returned_by_the_database, -1) == ("t", 0, 1)
    assert rows_changed_by("SET NOCOUNT ON; SELECT 1", -1) is None
