"""System checks: what is wrong is said at start, with an id and what to do."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.core.checks import Error, Warning, run_checks
from django.db import connection
from django.test import override_settings

from queueapp import Context, consumer, inline
from queueapp.checks import check_checkpoints, check_queues, check_settings, check_tables
from queueapp.models import TableOptions
from tests.in_process_worker import real_commits
from tests.testapp.models import AtMostOnce, Leased, Short, Transactional, Urgent


def ids(found: list[Any]) -> list[str]:
    return sorted(row.id for row in found)


def about(found: list[Any], queue: Any) -> list[Any]:
    return [item for item in found if item.obj is queue]


def test_nothing_is_wrong_with_the_project_as_it_is() -> None:
    assert check_settings() == []
    assert check_queues() == []


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ({"PEEK_DELAY": 0.05}, "PEEK_DELAY"),
        ({"PEEK_DELAY": "1s"}, "PEEK_DELAY"),
        ({"MAX_RECORDS_TO_PEEK": 0}, "MAX_RECORDS_TO_PEEK"),
    ],
)
def test_a_setting_that_is_not_accepted_is_an_error(settings: Any, setting: dict[str, Any], named: str) -> None:
    settings.QUEUEAPP = setting

    (found,) = check_settings()

    assert isinstance(found, Error)
    assert found.id == "queueapp.E001"
    assert f"QUEUEAPP.{named} = {setting[named]!r} is not accepted" in found.msg
    assert check_queues() == [], "said once"


def test_a_mistyped_setting_is_an_error_that_names_the_one_that_is_meant(settings: Any) -> None:
    settings.QUEUEAPP = {"PEEKDELAY": 1}

    (found,) = check_settings()

    assert (found.id, found.msg) == (
        "queueapp.E001",
        "QUEUEAPP: unknown option 'PEEKDELAY'; did you mean 'PEEK_DELAY'?",
    )


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("setting", "error"),
    [({"NO_SUCH_SETTING": 1}, "queueapp.E001"), ({"DELAYED_STORE": "no.such.Store"}, "queueapp.E004")],
)
def test_a_setting_that_is_not_accepted_ends_no_check_with_a_traceback(
    settings: Any, setting: dict[str, Any], error: str, no_consumers: None
) -> None:
    settings.QUEUEAPP = {**settings.QUEUEAPP, **setting}

    consumer(Leased)(lambda message: None)
    found = run_checks(include_deployment_checks=True, databases=["default"])

    assert [row.id for row in found if str(row.id).startswith("queueapp.E")] == [error]


@pytest.mark.parametrize(("seconds", "found"), [(0.1, []), (1, []), (10, []), (10.1, ["queueapp.W001"])])
def test_a_long_peek_delay_is_warned_about(settings: Any, seconds: float, found: list[str]) -> None:
    settings.QUEUEAPP = {"PEEK_DELAY": seconds}

    assert ids(check_settings()) == found


def test_a_dead_after_below_two_heartbeats_is_an_error(settings: Any) -> None:
    settings.QUEUEAPP = {"HEARTBEAT_INTERVAL": 10, "DEAD_AFTER": 19}

    (found,) = check_settings()

    assert found.id == "queueapp.E002"
    assert "twice HEARTBEAT_INTERVAL" in found.msg


def test_a_long_peek_delay_of_one_queue_is_warned_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Leased.delivery, "peek_delay", timedelta(seconds=11))

    (found,) = about(check_queues(), Leased)

    assert isinstance(found, Warning)
    assert found.id == "queueapp.W002"


def test_a_peek_delay_longer_than_the_expiration_is_warned_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Short.delivery, "expiration", timedelta(milliseconds=900))

    (found,) = about(check_queues(), Short)

    assert found.id == "queueapp.W003"
    assert "testapp.Short" in found.msg


def test_a_time_limit_longer_than_an_unrenewed_lease_is_an_error(
    monkeypatch: pytest.MonkeyPatch, no_consumers: None
) -> None:
    monkeypatch.setattr(Leased.delivery, "renew_leases", False)

    def handle(message: Any) -> None: ...

    consumer(Leased, name="slow", timeout=60)(handle)

    (found,) = about(check_queues(), Leased)
    assert found.id == "queueapp.E003"
    assert "slow" in found.msg

    monkeypatch.setattr(Leased.delivery, "renew_leases", True)
    assert about(check_queues(), Leased) == []


# -- the tables ----------------------------------------------------------------------------------------------------


@real_commits
def test_a_table_as_its_migration_made_it_is_all_right(few_receivers: None) -> None:
    assert check_tables(databases=["default"]) == []
    assert check_tables(databases=None) == [], "tables are looked at only when asked"


@real_commits
@pytest.mark.parametrize("queue", [Leased, Urgent])
def test_a_missing_index_is_warned_about_with_the_statement_that_makes_it(queue: Any) -> None:
    index = queue._meta.indexes[-1]
    with connection.schema_editor() as editor:
        editor.remove_index(queue, index)
    try:
        (found,) = about(check_tables(databases=["default"]), queue)
    finally:
        with connection.schema_editor() as editor:
            editor.add_index(queue, index)

    assert found.id == "queueapp.W004"
    assert index.name in found.msg
    assert found.hint.startswith("CREATE INDEX")


@real_commits
def test_a_table_whose_options_drifted_is_warned_about() -> None:
    if connection.vendor != "postgresql":
        pytest.skip("these storage options are PostgreSQL's")
    (options,) = [constraint for constraint in Leased._meta.constraints if isinstance(constraint, TableOptions)]
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE testapp_leased SET (fillfactor = 90)")
    try:
        (found,) = about(check_tables(databases=["default"]), Leased)
        with connection.cursor() as cursor:
            cursor.execute(found.hint)
        assert about(check_tables(databases=["default"]), Leased) == [], "the hint mends it"
    finally:
        with connection.schema_editor() as editor:
            editor.execute(options.create_sql(Leased, editor))

    assert "fillfactor" in found.msg


def test_eager_mode_without_the_workers_app_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inline, "engine", None)
    assert "queueapp.E008" not in [finding.id for finding in check_settings()]
    with override_settings(QUEUEAPP={"EAGER": "at_once"}):
        assert "queueapp.E008" in [finding.id for finding in check_settings()]


def test_a_checkpoint_where_nothing_can_be_kept_is_a_warning(no_consumers: None) -> None:

    def keep(message: dict, context: Context) -> None:
        def inner() -> None:
            context.checkpoint(1)

        inner()

    consumer(Leased)(keep)
    assert check_checkpoints() == []
    consumer(Transactional)(keep)
    consumer(AtMostOnce)(lambda message: None)
    (found,) = check_checkpoints()
    assert (found.id, found.obj) == ("queueapp.W095", Transactional)


@pytest.mark.parametrize(
    ("path", "ids_found"),
    [("", []), ("os.path.join", []), ("os.nothing", ["queueapp.E009"]), ("os.sep", ["queueapp.E009"])],
)
def test_what_is_around_handlers_can_be_called(path: str, ids_found: list[str]) -> None:
    with override_settings(QUEUEAPP={"HANDLER_CONTEXT_MANAGER": path}):
        assert [finding.id for finding in check_settings()] == ids_found
