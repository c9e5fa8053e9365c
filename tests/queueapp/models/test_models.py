"""The abstract ``Queue``: what its metaclass makes of a subclass, and what a migration makes of that."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.apps import apps
from django.core.management import call_command
from django.db import connection, migrations, models
from django.db.migrations.autodetector import MigrationAutodetector
from django.db.migrations.state import ModelState, ProjectState
from django.db.migrations.writer import MigrationWriter
from django.test.utils import isolate_apps

from queueapp import InvalidOption, Queue, QueueNotFound, Semantics, registry
from queueapp.models import BytesField, TableOptions
from queueapp.models.queue import claim_columns
from queueapp.sending.validation import alias_of
from queueapp.sql.claims import FOREVER
from queueapp.sql.tables import QueueTable
from tests import odbc
from tests.in_process_worker import real_commits
from tests.testapp.models import Addressed, AddressedUrgent, Leased, Readable, Short, Transactional, Urgent

#: Some tests define one model twice, to see what a changed option does.
pytestmark = pytest.mark.filterwarnings("ignore:Model .* was already registered")


@pytest.fixture(autouse=True)
def queues_of_the_test_only() -> Iterator[None]:
    """Queues that a test defines are forgotten with it."""
    with registry.queues.isolated(*registry.queues), isolate_apps("tests.testapp"):
        yield


def define(name: str, meta: dict[str, Any] | None = None, base: Any = Queue, **delivery: Any) -> Any:
    """A queue class, as a user would write it."""
    attrs: dict[str, Any] = {"__module__": "tests.testapp.models", "__qualname__": name}
    attrs["Meta"] = type("Meta", (), {"app_label": "testapp"} | (meta or {}))
    if delivery:
        attrs["Delivery"] = type("Delivery", (), delivery)
    return type(base)(name, (base,), attrs)


def names(items: Any) -> list[str]:
    return [item.name.rpartition("_")[2] for item in items]


# -- class Delivery ------------------------------------------------------------------------------------------------


def test_options_not_given_have_their_defaults() -> None:
    queue = define("Plain")

    assert queue.delivery.semantics is Semantics.AT_LEAST_ONCE
    assert queue.delivery.lease_period == timedelta(seconds=30)
    assert queue.delivery.priorities == 1


def test_a_subclass_inherits_the_options_of_its_bases_and_may_change_them() -> None:
    base = define("Base", {"abstract": True}, semantics=Semantics.TRANSACTIONAL, priorities=3)
    queue = define("Child", base=base, priorities=5)

    assert (queue.delivery.semantics, queue.delivery.priorities) == (Semantics.TRANSACTIONAL, 5)
    assert base.delivery.priorities == 3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"priorities": 11}, r"Bad\.Delivery\.priorities = 11 .* from 1 to 10"),
        ({"lease_period": 30}, r"Bad\.Delivery\.lease_period = 30 .* a timedelta"),
        ({"lease_period": timedelta(milliseconds=99)}, "lease_period"),
        ({"semantics": "exactly-once"}, "one of 'transactional', 'at-least-once', 'at-most-once'"),
        ({"peek_delay": timedelta(milliseconds=99)}, "peek_delay"),
        ({"max_records_to_peek": 0}, "max_records_to_peek"),
        ({"max_concurrent_per_key": 2}, "max_concurrent_per_key = 2.*None without fair_by"),
        ({"rate_per_key": "10/m"}, "rate_per_key = '10/m'.*None without fair_by"),
        ({"fair_weights": {"a": 2}}, "fair_weights = .*None without fair_by"),
        ({"rate_burst": 5}, "rate_burst = 5.*None without rate"),
        ({"fair_by": "a", "rate_burst_per_key": 5}, "rate_burst_per_key = 5.*None without rate_per_key"),
        ({"leaseperiod": timedelta(1)}, r"Bad\.Delivery: unknown option 'leaseperiod'; did you mean 'lease_period'\?"),
    ],
)
def test_a_bad_option_is_refused_at_import(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidOption, match=said):
        define("Bad", **options)

    with pytest.raises(QueueNotFound):
        registry.queues.find("testapp.Bad")


# -- class Meta ----------------------------------------------------------------------------------------------------


def test_a_meta_of_its_own_loses_nothing_of_the_parents() -> None:
    queue = define("Own", {"db_table": "own", "verbose_name": "own queue"})

    assert queue._meta.ordering == ["seq"]
    assert names(queue._meta.indexes) == ["expires"]
    assert names(queue._meta.constraints) == ["options"]
    assert queue._meta.verbose_name_plural == "own queue"


def test_indexes_and_constraints_of_the_users_own_are_kept() -> None:
    index = models.Index(fields=["correlation_id"], name="own_index")

    queue = define("Own", {"indexes": [index]})

    assert queue._meta.indexes[0].name == "own_index"
    assert len(queue._meta.indexes) == 2


@pytest.mark.parametrize(
    ("options", "columns"),
    [
        ({}, ()),
        ({"priorities": 3}, ("priority",)),
        ({"recipients": True}, ("recipient",)),
        ({"recipients": True, "priorities": 3}, ("recipient", "priority")),
    ],
)
def test_indexes_follow_from_the_options_and_none_is_on_a_lease(
    options: dict[str, Any], columns: tuple[str, ...]
) -> None:
    queue = define("Indexed", **options)

    assert claim_columns(queue.delivery) == columns
    fields = [[name for name, _ in index.fields_orders] for index in queue._meta.indexes]
    assert fields == [["expires"], *([[*columns, "seq"]] if columns else [])]


def test_names_of_long_tables_that_begin_alike_do_not_clash() -> None:
    stem = "a_table_with_a_name_that_is_longer_than_any_index_may_be"
    first, second = (define(f"Long{n}", {"db_table": f"{stem}_{n}"}, priorities=2) for n in (1, 2))

    taken = {item.name for queue in (first, second) for item in (*queue._meta.indexes, *queue._meta.constraints)}

    assert len(taken) == 6
    assert max(map(len, taken)) <= 30


# -- names ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", ["x" * 63, "ü" * 31, "a b", "it's", "[dbo]", "a.b", 'schema"."table', "Ünïcödé 队列"])
def test_unusual_names_are_accepted(table: str) -> None:
    assert define("Odd", {"db_table": table})._meta.db_table == table


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("x" * 64, "at most 63 bytes"),
        ("ü" * 32, "at most 63 bytes"),
        ('a"b', "double quotes"),
        ("100%", "percent"),
        ('a"."b"."c', "double quotes"),
        ('"."b', "double quotes"),
        ("a\0", "double quotes"),
    ],
)
def test_names_that_no_database_or_no_django_takes_are_refused(table: str, said: str) -> None:
    with pytest.raises(InvalidOption, match=said) as raised:
        define("Odd", {"db_table": table})

    assert raised.value.value == table


# -- the registry --------------------------------------------------------------------------------------------------


def test_a_queue_is_registered_and_an_abstract_one_is_not() -> None:
    define("Base", {"abstract": True})
    queue = define("Concrete", {"db_table": "the_table"})

    assert registry.queues.find("testapp.Concrete") is queue
    assert registry.queues.find("the_table") is queue
    with pytest.raises(QueueNotFound):
        registry.queues.find("testapp.Base")


def test_historical_models_of_migrations_are_no_queues() -> None:
    before = list(registry.queues)

    state = ProjectState()
    state.add_model(ModelState.from_model(Leased))
    historical = state.apps.get_model("testapp", "Leased")

    assert historical._meta.db_table == Leased._meta.db_table
    assert list(registry.queues) == before


def test_a_router_places_a_queue(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Router:
        def db_for_write(self, model: Any, **hints: Any) -> str | None:
            return "elsewhere" if model is Leased else None

    monkeypatch.setattr("django.db.router.routers", [Router()])

    assert alias_of(Leased) == "elsewhere"
    assert alias_of(Leased, "default") == "default"
    assert alias_of(Transactional) == "default"


def test_a_table_without_lease_columns_cannot_be_received_at_least_once() -> None:
    class Bare(Queue):
        lease_token = None

        class Meta:
            app_label = "testapp"
            abstract = True

    with pytest.raises(InvalidOption, match="TRANSACTIONAL or AT_MOST_ONCE for a table without lease_token"):
        define("Foreign", {"managed": False}, base=Bare)
    assert define("Foreign", {"managed": False}, base=Bare, semantics=Semantics.TRANSACTIONAL)


# -- migrations ----------------------------------------------------------------------------------------------------


@pytest.mark.django_db
def test_migrations_are_complete(capsys: pytest.CaptureFixture[str]) -> None:
    call_command("makemigrations", check=True, dry_run=True)

    assert "No changes detected" in capsys.readouterr().out


def test_a_written_migration_of_each_test_queue_reads_back_as_the_same_state() -> None:
    """The tables of the test queues follow their models, so the migrations that users commit are written here."""
    queues = list(apps.get_app_config("testapp").get_models())
    changes = MigrationAutodetector(ProjectState(), state_of(*queues))._detect_changes()  # it takes its state apart
    state = ProjectState()
    for migration in changes["testapp"]:
        written: dict[str, Any] = {}
        exec(MigrationWriter(migration, include_header=False).as_string(), written)
        for operation in written["Migration"].operations:
            operation.state_forwards("testapp", state)

    assert len(state.models) > 40
    assert migrated(state, state_of(*queues)) == []


def test_a_body_is_the_same_to_migrations_whether_or_not_the_sql_server_backend_is_loaded() -> None:
    odbc.required()
    pytest.importorskip("mssql.base")

    assert "max_length" not in BytesField().deconstruct()[3]
    assert BytesField(max_length=10).deconstruct()[3] == {"max_length": 10}


def migrated(before: ProjectState, after: ProjectState) -> list[Any]:
    changes = MigrationAutodetector(before, after)._detect_changes()
    return [operation for migration in changes.get("testapp", []) for operation in migration.operations]


def state_of(*queues: Any) -> ProjectState:
    state = ProjectState()
    for queue in queues:
        state.add_model(ModelState.from_model(queue))
    return state


def test_an_unchanged_queue_makes_no_migration() -> None:
    assert migrated(state_of(define("Same", priorities=2)), state_of(define("Same", priorities=2))) == []


def test_what_does_not_concern_the_table_makes_no_migration() -> None:
    before = define("Same", lease_period=timedelta(seconds=5))

    assert migrated(state_of(before), state_of(define("Same", lease_period=timedelta(hours=5), max_deliveries=9))) == []


def reloptions(table: str) -> set[str]:
    with connection.cursor() as cursor:
        cursor.execute("SELECT reloptions FROM pg_class WHERE relname = %s", [table])
        row = cursor.fetchone()
    return set(row[0] or ()) if row else set()


@pytest.fixture
def run_operations() -> Any:
    """Runs operations forwards and, at the end, backwards."""
    if connection.vendor != "postgresql":
        pytest.skip("looks into PostgreSQL's catalog")
    done: list[tuple[Any, ProjectState, ProjectState]] = []

    def run(operations: list[Any], state: ProjectState) -> ProjectState:
        for operation in operations:
            before, state = state, state.clone()
            operation.state_forwards("testapp", state)
            with connection.schema_editor() as editor:
                operation.database_forwards("testapp", editor, before, state)
            done.append((operation, state, before))
        return state

    yield run
    for operation, after, before in reversed(done):
        with connection.schema_editor() as editor:
            operation.database_backwards("testapp", editor, after, before)


@real_commits
@pytest.mark.parametrize("options", [{}, {"priorities": 3, "recipients": True}, {"body_string": True}])
def test_a_new_queue_is_made_and_unmade_by_its_migration(run_operations: Any, options: dict[str, Any]) -> None:
    queue = define("Fresh", {"db_table": "fresh 'queue'"}, fillfactor=55, autovacuum_threshold=77, **options)

    run_operations(migrated(ProjectState(), state_of(queue)), ProjectState())

    assert {"fillfactor=55", "autovacuum_vacuum_threshold=77"} <= reloptions("fresh 'queue'")
    queue.send({"a": 1})
    with queue.receive() as batch:
        (message,) = batch
        message.ack()
    with connection.cursor() as cursor:
        columns = {column.name for column in connection.introspection.get_table_description(cursor, "fresh 'queue'")}
    assert ("body_string" in columns) is bool(options.get("body_string"))


@real_commits
def test_a_changed_storage_option_is_an_ordinary_migration(run_operations: Any) -> None:
    before, after = (
        define("Tuned", {"db_table": "tuned"}, fillfactor=70),
        define("Tuned", {"db_table": "tuned"}, fillfactor=90),
    )
    state = run_operations(migrated(ProjectState(), state_of(before)), ProjectState())
    assert "fillfactor=70" in reloptions("tuned")

    operations = migrated(state, state_of(after))
    run_operations(operations, state)

    assert {type(operation) for operation in operations} <= {
        migrations.RemoveConstraint, migrations.AddConstraint, getattr(migrations, "AlterConstraint", None),
    }  # fmt: skip
    assert "fillfactor=90" in reloptions("tuned")


@real_commits
def test_a_queue_may_live_in_a_schema_of_its_own(run_operations: Any) -> None:
    with connection.cursor() as cursor:
        cursor.execute("CREATE SCHEMA IF NOT EXISTS apart")
    queue = define("Apart", {"db_table": 'apart"."letters'}, priorities=2)
    run_operations(migrated(ProjectState(), state_of(queue)), ProjectState())

    queue.send({"a": 1}, priority=1)
    queue.send_many([{"a": 2}])

    with queue.receive(10) as batch:
        assert [message.body["a"] for message in batch] == [1, 2]
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM apart.letters")
        assert cursor.fetchone() == (2,)


def test_storage_options_are_distinguished_by_their_values() -> None:
    table_options = TableOptions(name="n", fillfactor=70)

    path, args, kwargs = table_options.deconstruct()

    assert TableOptions(*args, **kwargs) == table_options
    assert path == "queueapp.models.TableOptions"
    assert TableOptions(name="n", fillfactor=71) != table_options
    assert table_options != "something else"
    assert table_options.validate() is None
    assert table_options.check() == []


@pytest.mark.parametrize("queue", [Leased, Transactional, Urgent, Addressed, AddressedUrgent, Readable, Short])
def test_a_row_has_a_name_for_people(queue: Any) -> None:
    assert str(queue(seq=7)) == f"{queue._meta.label} 7"


def test_an_unknown_wire_format_is_refused() -> None:
    with pytest.raises(InvalidOption, match=r"Telegraph\.wire_format = 'morse'.*one of '', 'nservicebus'"):

        class Telegraph(Queue):
            wire_format = "morse"

            class Meta:
                app_label = "testapp"


# -- expressions at entry ----------------------------------------------------------------------------------------------


def test_a_default_holds_what_others_insert_on_queues_with_expressions_alone() -> None:
    base = define("Base", {"abstract": True}, filter="/a = 1")
    sieve, unfiltered = define("Sieve", base=base), define("Unfiltered", base=base, filter=None)
    glance = define("Glance", {"proxy": True}, base=sieve)

    assert sieve._meta.get_field("lease_expires").db_default == FOREVER
    assert not unfiltered._meta.get_field("lease_expires").has_db_default()
    assert glance._meta.get_field("lease_expires") is sieve._meta.get_field("lease_expires")
    assert [QueueTable.of(item).filled for item in (sieve, unfiltered)] == [{"lease_expires": None}, {}]
    assert names(sieve._meta.indexes) == ["expires", "held"]
    assert names(unfiltered._meta.indexes) == ["expires"]
