"""The databases of this run: the one that DATABASE_URL names, and the SQL Server of QUEUEAPP_TEST_SQLSERVER_URL if it
is set.

Either kind may be the default. A test that runs on each is given an alias for each kind, and skipped for one that is
not there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote, urlencode

import pytest
from django.db import connections

from queueapp.sql import queue_sql
from tests.in_process_worker import real_commits
from tests.testapp.models import Leased

_DEFAULT_IS_POSTGRESQL = connections["default"].vendor == "postgresql"

#: Kind -> alias; a kind that no alias has gets one that is not configured.
DATABASES = {
    "postgresql": "default" if _DEFAULT_IS_POSTGRESQL else "postgresql",
    "sqlserver": "sqlserver" if _DEFAULT_IS_POSTGRESQL else "default",
}


#: For a test whose statements are PostgreSQL's own; where the engine is meant, ``statements_of`` and
#: ``tests.kill_session`` serve both.
_OF_POSTGRESQL = "its statements are PostgreSQL's: DATABASE_URL names a SQL Server"
only_on_postgresql = pytest.mark.skipif(not _DEFAULT_IS_POSTGRESQL, reason=_OF_POSTGRESQL)


def skip_cases_on_sqlserver(items: Iterable[pytest.Item]) -> None:
    """Skip the SQL Server's case of each test that is ``only_on_postgresql`` and runs once per database."""
    for item in items:
        of_databases = "sqlserver" in getattr(getattr(item, "callspec", None), "params", {}).values()
        if of_databases and any(mark.kwargs.get("reason") == _OF_POSTGRESQL for mark in item.iter_markers("skipif")):
            item.add_marker(pytest.mark.skip("its statements are PostgreSQL's"))


def skip_unless_prepared(connection: Any) -> None:
    """Skip the calling test where PREPARE TRANSACTION is switched off, as it is by default."""
    with connection.cursor() as cursor:
        cursor.execute("SHOW max_prepared_transactions")
        if cursor.fetchone() == ("0",):
            pytest.skip("max_prepared_transactions = 0: nothing can be prepared on this server")


def marks_of(alias: str, *rest: str) -> list[Any]:
    """The marks of a case that runs on this database; ``rest`` are further aliases that it uses."""
    if alias not in connections:
        reason = (
            "needs a SQL Server: QUEUEAPP_TEST_SQLSERVER_URL is not set"
            if alias == "sqlserver"
            else "needs a PostgreSQL: DATABASE_URL names a SQL Server"
        )
        return [pytest.mark.skip(reason)]
    # The names, not the marks: two django_db marks on one test would leave one of them out.
    return [pytest.mark.django_db(**real_commits.kwargs, databases={"default", alias, *rest})]


def parametrize_alias(metafunc: pytest.Metafunc, apps: Sequence[str]) -> None:
    """One case per database for a test that takes ``alias``, which may write to the tables of these apps."""
    if "alias" not in metafunc.fixturenames:
        return
    cases = []
    for database, alias in DATABASES.items():
        marks = marks_of(alias)
        if marks[0].name == "django_db":
            marks = [pytest.mark.django_db(**{**marks[0].kwargs, "available_apps": list(apps)})]
        cases.append(pytest.param(alias, id=database, marks=marks))
    metafunc.parametrize("alias", cases)


@contextmanager
def known_as(alias: str, of: str = "default", **changes: Any) -> Iterator[str]:
    """Let this process know one of its databases under another alias, or with ``changes`` a different one. This
    thread's connection goes with it: one that is left would be used by the next test that has a database of that
    name."""
    connections.settings[alias] = {**connections.settings[of], **changes}
    try:
        yield alias
    finally:
        connections[alias].close()
        del connections[alias]
        del connections.settings[alias]


def statements_of(connection: Any, subject: str) -> type[Any]:
    """The class that implements a subject of the statements (``"claims"``, ``"inserts"``, …) on this connection's
    database."""
    return type(getattr(queue_sql(Leased, connection), subject))


def url_of(entry: dict[str, Any]) -> str:
    """A DATABASE_URL for a SQL Server's entry of DATABASES that was made of one, so that a child process finds the same
    database and takes the same driver."""
    options = {name: value for name, value in (entry.get("OPTIONS") or {}).items() if name in _OF_URL}
    # What mssql-django has no option for stands in the connection string.
    given = [word.partition("=") for word in str(options.pop("extra_params", "")).split(";") if word]
    options |= {name: value for name, _, value in given}
    address = quote(entry.get("HOST") or "", safe="")
    if entry.get("PORT"):
        address += f":{entry['PORT']}"
    user, password = (quote(entry.get(name) or "", safe="") for name in ("USER", "PASSWORD"))
    return f"mssql://{user}:{password}@{address}/{quote(str(entry['NAME']), safe='')}?{urlencode(options)}"


_OF_URL = (
    "driver", "python_driver", "isolation_level", "collation", "connection_timeout", "connection_retries",
    "connection_retry_backoff_time", "query_timeout", "extra_params",
)  # fmt: skip


def url_of_database() -> str:
    """DATABASE_URL of the default database of this moment, for child processes."""
    connection = connections["default"]
    if connection.vendor == "microsoft":
        return url_of(connection.settings_dict)
    parameters = connection.get_connection_params()
    query = {name: parameters[name] for name in ("host", "port", "password") if parameters.get(name)}
    user = quote(parameters.get("user") or "", safe="")
    name = quote(str(connection.settings_dict["NAME"]), safe="")
    return f"postgresql://{user}@/{name}?{urlencode(query)}"
