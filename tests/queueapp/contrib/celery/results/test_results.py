"""What is kept of a task, and what is said of it."""

from __future__ import annotations

import json
import pickle
import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from celery import Celery, states
from celery.exceptions import ImproperlyConfigured, NotRegistered
from celery.result import AsyncResult, GroupResult
from celery.utils.objects import Bunch
from django.db import Error, connections, transaction
from django.utils import timezone

from queueapp.contrib.celery import result_rows, retrying
from queueapp.contrib.celery.models import CeleryGroup, CeleryResult
from queueapp.contrib.celery.results import ResultBackend
from queueapp.services.leader_election import Elector
from queueapp.services.maintenance import Maintenance
from tests.databases import only_on_postgresql
from tests.in_process_worker import DEADLINE, eventually
from tests.kill_session import kill_this
from tests.queueapp.contrib.celery.results.conftest import request_of
from tests.testapp.models import Leased


def test_a_result_is_kept_and_read(backend: Any, app: Celery, alias: str) -> None:
    request = request_of("a", retries=2, group="g", parent_id="p")
    backend.mark_as_done("a", {"answer": [1, "ø", None]}, request)

    result = AsyncResult("a", app=app)
    assert result.status == states.SUCCESS
    assert result.get(timeout=0) == {"answer": [1, "ø", None]}
    assert (result.name, result.worker, result.queue, result.retries) == ("shop.bill", "worker@here", "mail", 2)
    meta = backend.get_task_meta("a")
    assert (meta["group_id"], meta["parent_id"]) == ("g", "p")
    assert result.args is None, "result_extended is off"


def test_times_are_the_databases(backend: Any, alias: str) -> None:
    # A comparison with this process' clock fails on a machine whose clock is wrong.
    from queueapp.sql import backend_of

    before = backend_of(connections[alias]).now(connections[alias])
    backend.store_result("a", 1, states.STARTED)
    assert backend.get_task_meta("a", cache=False)["date_done"] is None
    backend.store_result("a", 1, states.SUCCESS)
    after = backend_of(connections[alias]).now(connections[alias])

    row = CeleryResult.objects.using(alias).get()
    assert before <= row.created_at <= row.date_done <= after
    assert backend.get_task_meta("a")["date_done"] == row.date_done


def test_extended_results_have_the_arguments(app: Celery) -> None:
    app.conf.result_extended = True
    app.backend.mark_as_done("a", 1, request_of("a", args=(1, object()), stamped_headers=["by"], stamps={"by": "me"}))

    result = AsyncResult("a", app=app)
    assert result.kwargs == {"n": 2}
    assert "object object" in result.args, "what is no JSON is kept as it looks"
    assert result._get_task_meta()["by"] == "me"


def test_an_exception_comes_back(backend: Any, app: Celery) -> None:
    backend.mark_as_failure("a", KeyError("pence"), "Traceback:\n\0 line \ud800", request=request_of("a"))

    result = AsyncResult("a", app=app)
    with pytest.raises(KeyError, match="pence"):
        result.get(timeout=0)
    assert result.traceback.startswith("Traceback:\n")
    assert result.failed()


def test_a_success_is_never_overwritten(backend: Any) -> None:
    backend.store_result("a", "first", states.SUCCESS)
    backend.store_result("a", KeyError("second run"), states.FAILURE)
    backend.store_result("a", "third", states.SUCCESS)

    assert backend.get_task_meta("a", cache=False)["result"] == "first"


def test_a_failure_is_overwritten(backend: Any) -> None:
    backend.store_result("a", KeyError("first run"), states.FAILURE)
    backend.store_result("a", "requeued", states.SUCCESS)

    assert backend.get_task_meta("a")["result"] == "requeued"


def test_values_of_an_earlier_state_are_kept(backend: Any, alias: str) -> None:
    backend.store_result("a", None, states.STARTED, request=request_of("a"))
    backend.store_result("a", 5, states.FAILURE)  # as Celery does for the body of a chord

    row = CeleryResult.objects.using(alias).get()
    assert (row.name, row.worker, row.status) == ("shop.bill", "worker@here", "FAILURE")


def test_an_unknown_task_without_an_id_has_no_result(backend: Any, app: Celery, alias: str) -> None:
    assert AsyncResult("none", app=app).status == states.PENDING
    pending = {"task_id": "none", "status": states.PENDING, "result": None, "traceback": None}
    assert backend.get_task_meta("none") == pending
    assert not backend.task_result_exists("none")
    assert not CeleryResult.objects.using(alias).exists()


def test_a_result_is_forgotten(backend: Any, app: Celery) -> None:
    backend.store_result("a", 1, states.SUCCESS)
    assert backend.task_result_exists("a")
    AsyncResult("a", app=app).forget()

    assert AsyncResult("a", app=app).status == states.PENDING


@pytest.mark.parametrize("identity", ["x" * 256, "a\0b"], ids=["too long", "a NUL"])
def test_an_id_that_is_none_is_refused(backend: Any, identity: str) -> None:
    with pytest.raises(ValueError, match="at most 255 characters"):
        backend.store_result(identity, 1, states.SUCCESS)


@pytest.mark.parametrize("identity", ["a", "a\0b", "x" * 256, 5], ids=["an id", "a NUL", "too long", "a number"])
def test_a_task_that_its_worker_does_not_know_never_ends_the_worker(backend: Any, alias: str, identity: Any) -> None:
    # All that Celery's worker says of it.
    request = Bunch(name="gone", chord=None, root_id=None, correlation_id="a", reply_to=None, errbacks=None)

    backend.mark_as_failure(identity, NotRegistered("gone"), request=request)

    kept = CeleryResult.objects.using(alias).values_list("task_id", "status")
    assert list(kept) == ([("a", states.FAILURE)] if identity == "a" else [])


# -- groups ------------------------------------------------------------------------------------------------------------


def test_a_group_is_saved_restored_and_deleted(app: Celery, alias: str) -> None:
    inner = GroupResult("inner", [AsyncResult("b", app=app)], app=app)
    group = GroupResult("g", [AsyncResult("a", app=app), inner], app=app)
    group.save()

    found = GroupResult.restore("g", app=app)
    assert found is not None
    assert found.as_tuple() == group.as_tuple()
    found.delete()
    assert GroupResult.restore("g", app=app) is None
    assert not CeleryGroup.objects.using(alias).exists()


def test_the_app_that_has_the_tables_is_asked_for(app: Celery, alias: str, settings: Any) -> None:
    settings.INSTALLED_APPS = [
        installed_app for installed_app in settings.INSTALLED_APPS if installed_app != "queueapp.contrib.celery"
    ]

    with pytest.raises(ImproperlyConfigured, match=r"need 'queueapp\.contrib\.celery' in INSTALLED_APPS"):
        app.backend.store_result("a", 1, states.SUCCESS)


def test_results_are_json_whatever_is_accepted_of_tasks(app: Celery, alias: str) -> None:
    app.conf.accept_content = ["pickle"]
    app.backend.store_result("a", {"n": 1}, states.SUCCESS)

    assert app.backend.accept == {"application/json"}
    assert AsyncResult("a", app=app).get(timeout=DEADLINE) == {"n": 1}


# -- expiry ------------------------------------------------------------------------------------------------------------


def test_expired_results_are_not_returned_and_are_deleted_in_batches(
    app: Celery, alias: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(result_rows, "BATCH", 2)
    app.conf.result_expires = 60
    backend = app.backend
    for n in range(5):
        backend.store_result(f"old-{n}", n, states.SUCCESS)
    GroupResult("old", [], app=app).save()
    rows = CeleryResult.objects.using(alias)
    assert {round((row.expires_at - row.date_done).total_seconds()) for row in rows.all()} == {60}
    past = timezone.now() - timedelta(days=1)
    rows.update(expires_at=past)
    CeleryGroup.objects.using(alias).update(expires_at=past)
    backend.store_result("new", 1, states.SUCCESS)

    assert backend.get_task_meta("old-0", cache=False)["status"] == states.PENDING
    assert backend.restore_group("old") is None
    assert result_rows.delete_old(alias, lambda: rows.count() > 4) == 2
    app.tasks["celery.backend_cleanup"]()
    assert [row.task_id for row in rows.all()] == ["new"]
    assert not CeleryGroup.objects.using(alias).exists()


def test_maintenance_deletes_expired_results(backend: Any, alias: str, settings: Any) -> None:
    settings.QUEUEAPP = {"HEARTBEAT_INTERVAL": 0.2}
    backend.store_result("old", 1, states.SUCCESS)
    CeleryResult.objects.using(alias).update(expires_at=timezone.now() - timedelta(days=1))
    maintenance = Maintenance(alias, [Leased], Elector(alias, "maintenance", uuid.uuid4()))
    maintenance.start()
    try:
        eventually(lambda: not CeleryResult.objects.using(alias).exists())
    finally:
        maintenance.stop()


@only_on_postgresql
def test_maintenance_skips_missing_tables_and_nothing_else(alias: str) -> None:
    table = CeleryResult._meta.db_table
    with transaction.atomic(using=alias):
        with connections[alias].cursor() as cursor:
            cursor.execute(f"ALTER TABLE {table} RENAME TO {table}_away")
        result_rows.run_maintenance(alias, lambda: True)
        transaction.set_rollback(True, using=alias)
    with transaction.atomic(using=alias):
        with connections[alias].cursor() as cursor:
            cursor.execute("SET TRANSACTION READ ONLY")
        with pytest.raises(Error):
            result_rows.run_maintenance(alias, lambda: True)


def test_results_may_be_kept_for_ever_and_failures_for_less(app: Celery, alias: str) -> None:
    app.conf.result_expires = None
    app.conf.result_failure_expires = timedelta(minutes=2)
    app.conf.result_chord_expires = timedelta(minutes=3)
    app.backend.store_result("a", 1, states.SUCCESS)
    app.backend.set_chord_size("chord", 2)
    app.backend.store_result("b", KeyError(), states.FAILURE)

    rows = {row.task_id: row for row in CeleryResult.objects.using(alias)}
    assert rows["a"].expires_at is None
    assert round((rows["b"].expires_at - rows["b"].date_done).total_seconds()) == 120
    chord = CeleryGroup.objects.using(alias).get()
    assert round((chord.expires_at - chord.created_at).total_seconds()) == 180


# -- settings ----------------------------------------------------------------------------------------------------------


def test_pickle_is_refused(app: Celery, alias: str) -> None:
    app.conf.result_serializer = "pickle"
    with pytest.raises(ImproperlyConfigured, match=r"result_serializer = 'pickle'.*Use 'json'"):
        app._get_backend()


def test_a_pickle_in_the_table_is_not_read(app: Celery, alias: str) -> None:
    app.conf.accept_content = ["json", "pickle"]
    app.backend.store_result("a", 1, states.SUCCESS)
    evil = pickle.dumps(datetime(2026, 1, 1, tzinfo=UTC), 0).decode("latin-1")
    CeleryResult.objects.using(alias).update(result=evil)

    with pytest.raises(Exception, match=r"(?i)json|decode|expecting|extra data"):
        AsyncResult("a", app=app).get(timeout=0)


@pytest.mark.parametrize(
    "url",
    ["queueapp://user:secret@host/db", "queueapp://user@host", "queueapp://default/table", "queueapp://default?pool=5"],
)
@pytest.mark.django_db
def test_a_malformed_url_is_refused(url: str) -> None:
    with pytest.raises(ImproperlyConfigured, match="is not accepted"):
        _ = Celery("x", backend=url, set_as_current=False).backend


@pytest.mark.django_db
def test_an_alias_that_is_none_is_refused() -> None:
    backend = Celery("x", backend="queueapp://nowhere", set_as_current=False).backend
    with pytest.raises(ImproperlyConfigured, match=r"DATABASES has no 'nowhere'; it has .*default"):
        backend.get_state("a")


@pytest.mark.django_db
def test_without_an_alias_the_router_decides() -> None:
    backend = Celery("x", backend="queueapp://", set_as_current=False).backend
    assert isinstance(backend, ResultBackend)
    assert backend.alias == "default"


def test_a_backend_can_be_pickled(backend: Any) -> None:
    args = backend.__reduce__()[1]
    assert args[0] is ResultBackend
    assert args[2]["url"] == backend.url


# -- leftovers of a task, and errors of the database ------------------------------------------------------------------


def test_a_task_that_closed_its_session_is_kept(backend: Any, alias: str) -> None:
    connections[alias].ensure_connection()
    kill_this(connections[alias])
    backend.mark_as_done("a", 1, request_of("a"))

    assert backend.get_task_meta("a")["status"] == states.SUCCESS


def test_a_task_that_left_a_transaction_open_is_kept(backend: Any, alias: str) -> None:
    connections[alias].set_autocommit(False)
    CeleryGroup.objects.using(alias).create(group_id="of the task")
    backend.mark_as_done("a", 1, request_of("a"))
    connections[alias].close()

    assert backend.get_task_meta("a", cache=False)["status"] == states.SUCCESS
    assert not CeleryGroup.objects.using(alias).exists(), "it would never have been committed"


def test_a_task_that_left_an_atomic_block_open_is_kept(backend: Any, alias: str) -> None:
    transaction.atomic(using=alias).__enter__()
    CeleryGroup.objects.using(alias).create(group_id="of the task")
    backend.mark_as_done("a", 1, request_of("a"))

    assert not connections[alias].in_atomic_block
    assert backend.get_task_meta("a", cache=False)["status"] == states.SUCCESS
    assert not CeleryGroup.objects.using(alias).exists()


def test_in_the_callers_transaction_a_result_is_part_of_it(backend: Any, alias: str) -> None:
    with transaction.atomic(using=alias):
        backend.store_result("a", 1, states.SUCCESS)
        backend.mark_as_done("b", 1, request_of("b", is_eager=True))
        transaction.set_rollback(True, using=alias)

    assert not CeleryResult.objects.using(alias).exists()


def test_an_error_that_does_not_pass_is_raised(backend: Any, alias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def call() -> None:
        calls.append(1)
        with connections[alias].cursor() as cursor:
            cursor.execute("SELECT * FROM no_such_table")

    with pytest.raises(Exception, match="no_such_table"):
        retrying.with_retries(alias, call)
    assert len(calls) == 1


def test_in_the_callers_transaction_nothing_is_tried_again(backend: Any, alias: str) -> None:
    calls = []

    def call() -> None:
        calls.append(1)
        kill_this(connections[alias])
        with connections[alias].cursor() as cursor:
            cursor.execute("SELECT 1")

    with pytest.raises(Error), transaction.atomic(using=alias):
        retrying.with_retries(alias, call)
    assert len(calls) == 1


def test_after_a_task_only_a_connection_that_is_lost_is_closed(backend: Any, alias: str) -> None:
    connection = connections[alias]
    connection.ensure_connection()
    before = connection.connection
    retrying.close_lost_connections()
    assert connection.connection is before

    kill_this(connection)
    with pytest.raises(Error), connection.cursor() as cursor:
        cursor.execute("SELECT 1")
    retrying.close_lost_connections()
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")
    assert connection.connection is not before


def test_a_row_is_plain_json(backend: Any, alias: str) -> None:
    backend.store_result("a", {"x": "\0é"}, states.SUCCESS)

    assert json.loads(CeleryResult.objects.using(alias).get().result) == {"x": "\0é"}
