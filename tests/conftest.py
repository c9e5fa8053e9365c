"""What every test may use: a database of this run's own, and the way for a child process to reach it.

The test database lies on the server that `DATABASE_URL` names, by default the embedded PostgreSQL. Its name carries
the process id, so that several runs of one checkout do not meet; those of runs that were killed are dropped.
"""

import gc
import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from typing import Any

import hypothesis
import pytest
from django.db import connection, connections
from pytest_django import DjangoDbBlocker

from queueapp import overrides
from queueapp.consuming.registry import registered
from queueapp.models import Subscription
from queueapp.sql.postgresql.raw.plan_guard import PlanGuard
from queueapp.testing import reset_caches
from tests import servers_in_memory
from tests.databases import skip_cases_on_sqlserver, url_of_database
from tests.in_process_worker import Worker, starting_workers
from tests.truncate import (
    flush_children_first,
    flush_what_was_written_to,
    flush_without_a_command,
    try_again_after_deadlocks,
)

_NAME = "test_queueapp_{}"

# An installed queueapp is a plugin by its entry point.
pytest_plugins = ["queueapp.testing.plugin"]

# A shell without job control starts background commands with SIGINT ignored, and every child inherits that: the tests
# of Ctrl-C would fail there. A handler, unlike "ignored", does not survive exec.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A deadline per example would only measure what else the machine is doing.
hypothesis.settings.register_profile("queueapp", deadline=None, max_examples=50)
hypothesis.settings.load_profile("queueapp")


def _starts_the_others(config: pytest.Config) -> bool:
    return bool(config.getoption("numprocesses", None)) and not hasattr(config, "workerinput")


def pytest_configure(config: pytest.Config) -> None:
    if _starts_the_others(config):
        servers_in_memory.make_place()


def pytest_unconfigure(config: pytest.Config) -> None:
    if _starts_the_others(config):
        servers_in_memory.remove_place()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What was skipped and why, a line per reason: hundreds of lines, one per test, would hide what failed."""
    reasons = Counter(report.longrepr[2] for report in terminalreporter.getreports("skipped"))
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} x {reason}")


#: Where the files are that take half a minute and more.
_LONGEST = (
    "tests/crash/", "tests/celery_suite/", "tests/docs/test_tutorial.py", "tests/typing/", "tests/packaging/",
    "tests/queueapp/contrib/celery/broker_migration/test_movebroker.py", "tests/project/embedded_postgres/",
)  # fmt: skip


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where processes share the files, the longest are first: the last ones of all processes are then over at about the
    same time. (Of themselves those without a database would come last, and these among them.)"""
    skip_cases_on_sqlserver(items)
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: not item.nodeid.startswith(_LONGEST))


def pytest_collection_finish() -> None:
    """Thousands of collected tests and all modules stay to the end: the garbage collector, which went through them each
    time, took a sixth of the whole run."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """What a test said goes from its process to the first one as UTF-8, which the lone surrogates of hostile text are
    not."""
    return _encodable((yield))


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, dict):
        return {key: _encodable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_encodable(item) for item in value)
    return value


_orders: list[PlanGuard] = []
_begin = PlanGuard.__init__


def _remembered(order: PlanGuard) -> None:
    _begin(order)
    _orders.append(order)


PlanGuard.__init__ = _remembered  # type: ignore[method-assign]


@pytest.fixture(autouse=True)
def no_overrides() -> None:
    """A process remembers the consumers that live workers had, what was set for queues, which statements the planner
    would sort, which delayed stores are open, and up to where each queue is empty: those of another test are none of
    this one's, whose seqs may begin at 1 again."""
    for alias in connections:
        overrides.load(alias, {})  # the values of statements until a test loads others
    reset_caches()
    for order in _orders:
        _begin(order)


def _consumers() -> list[tuple[str, str]]:
    return sorted((queue._meta.label, row.name) for queue in registered.queues() for row in registered.of(queue))


@pytest.fixture(autouse=True)
def consumers_as_found(no_overrides: None) -> Iterator[None]:
    """A consumer that a test registers and leaves behind handles the messages of the tests after it."""
    before = _consumers()
    yield
    assert _consumers() == before, "a test leaves consumers behind: it lacks the fixture no_consumers"


@pytest.fixture
def no_consumers() -> Iterator[None]:
    """Only the consumers that the test registers."""
    with registered.isolated():
        yield


@pytest.fixture
def start_worker() -> Iterator[Callable[..., Worker]]:
    """Starts workers in this process; they stop with the test."""
    with starting_workers() as start:
        yield start


@pytest.fixture(scope="session")
def django_db_setup(django_db_setup: None, django_db_blocker: DjangoDbBlocker) -> None:
    """``migrate`` has written who subscribes by the code of the test app; most tests have consumers of their own."""
    with django_db_blocker.unblock():
        for connection in connections.all(initialized_only=False):
            Subscription.objects.using(connection.alias).all().delete()


@pytest.fixture(scope="session")
def django_db_modify_db_settings(
    django_db_modify_db_settings_parallel_suffix: None, django_db_blocker: DjangoDbBlocker
) -> None:
    for item in connections.all(initialized_only=False):
        item.settings_dict["TEST"]["NAME"] = _NAME.format(os.getpid())
        if item.vendor == "microsoft":
            flush_children_first(item)
        elif item.vendor == "postgresql":
            flush_what_was_written_to(item)
        try_again_after_deadlocks(item)
    flush_without_a_command()
    if connection.settings_dict["ENGINE"] == "project.embedded_backend":
        with django_db_blocker.unblock():
            _drop_databases_of_killed_runs()


def _drop_databases_of_killed_runs() -> None:
    with connection._nodb_cursor() as cursor:
        cursor.execute("SELECT datname FROM pg_database")
        names = [name for (name,) in cursor.fetchall()]
        for name in names:
            match = re.fullmatch(_NAME.format(r"(\d+)(?:_\w+)?"), name)
            if match and not _is_running(int(match[1])):
                cursor.execute(f"DROP DATABASE IF EXISTS {connection.ops.quote_name(name)} WITH (FORCE)")


def _is_running(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


@pytest.fixture
def database_url(transactional_db: None) -> str:
    """DATABASE_URL of the test database, for child processes; they see committed rows."""
    return url_of_database()


@pytest.fixture
def child_environment(database_url: str) -> dict[str, str]:
    """The environment of a child process that works on the test database, with the settings of the tests."""
    return os.environ | {"DATABASE_URL": database_url, "DJANGO_SETTINGS_MODULE": "tests.settings"}
