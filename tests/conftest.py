"""What every test may use: a database of this run's own, and the way for a child process to reach it.

The test database lies on the server that `DATABASE_URL` names, by default the embedded PostgreSQL. Its name carries
the process id, so that several runs of one checkout do not meet; those of runs that were killed are dropped.
"""

import os
import re
import signal
from collections import Counter
from urllib.parse import quote, urlencode

import hypothesis
import pytest
from django.db import connection, connections
from pytest_django import DjangoDbBlocker

from queueapp.sending import recipients
from tests.databases import url_of
from tests.flushing import flush_children_first

_NAME = "test_queueapp_{}"

# A shell without job control starts background commands with SIGINT ignored, and every child inherits that: the tests of
# Ctrl-C would fail there. A handler, unlike "ignored", does not survive exec.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A deadline per example would only measure what else the machine is doing.
hypothesis.settings.register_profile("queueapp", deadline=None, max_examples=50)
hypothesis.settings.load_profile("queueapp")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What was skipped and why, a line per reason: hundreds of lines, one per test, would hide what failed."""
    reasons = Counter(report.longrepr[2] for report in terminalreporter.getreports("skipped"))
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} x {reason}")


@pytest.fixture(autouse=True)
def nothing_told() -> None:
    """A process remembers the consumers that live workers had: those of another test are none of this one's."""
    recipients.forget()


@pytest.fixture(scope="session")
def django_db_modify_db_settings(
    django_db_modify_db_settings_parallel_suffix: None, django_db_blocker: DjangoDbBlocker
) -> None:
    for each in connections.all(initialized_only=False):
        each.settings_dict["TEST"]["NAME"] = _NAME.format(os.getpid())
        if each.vendor == "microsoft":
            flush_children_first(each)
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
    if connection.vendor == "microsoft":
        return url_of(connection.settings_dict)
    parameters = connection.get_connection_params()
    query = {name: parameters[name] for name in ("host", "port", "password") if parameters.get(name)}
    user = quote(parameters.get("user") or "", safe="")
    name = quote(str(connection.settings_dict["NAME"]), safe="")
    return f"postgresql://{user}@/{name}?{urlencode(query)}"


@pytest.fixture
def child_environment(database_url: str) -> dict[str, str]:
    """The environment of a child process that works on the test database, with the settings of the tests."""
    return os.environ | {"DATABASE_URL": database_url, "DJANGO_SETTINGS_MODULE": "tests.settings"}
