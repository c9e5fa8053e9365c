"""Says in one line what is wrong with the environment of a command, and what to do next.

Only errors whose cause lies outside the code are described: the settings, reaching the database, missing rights,
missing tables. For everything else the traceback is the best report.
"""

import traceback
from collections.abc import Iterator

from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, connections

_CHECK_URL = (
    "check that the server runs and that DATABASE_URL names it (leave DATABASE_URL unset for the embedded PostgreSQL)"
)
_DRIVER_PACKAGES = "on Debian, SQL Server's driver needs: apt-get install libodbc2 libltdl7 libgssapi-krb5-2"
_CHECK_LOG = "`python -m project.embedded_postgres status` prints the paths of its data and its log"


def describe(error: BaseException) -> str | None:
    """One line for a mistake of the environment, or None when `error` is something else."""
    chain = list(_chain(error))
    if isinstance(error, ImproperlyConfigured):
        missing = next((cause for cause in chain if isinstance(cause, ImportError)), None)
        if missing is not None:
            return f"the driver of the database cannot be loaded: {_one_line(missing)} -- {_DRIVER_PACKAGES}"
        return _one_line(error)
    if _was_connecting(error):
        return f"{_database()} cannot be reached: {_one_line(error)} -- {_advice()}"
    if not isinstance(error, DatabaseError):
        return None
    sqlstate = next((state for cause in chain if (state := getattr(cause, "sqlstate", None))), "")
    if sqlstate == "42501" or "permission was denied" in str(error):
        return (
            f"{_database()}: {_one_line(error)} -- grant that right to its user, or name another user in DATABASE_URL"
        )
    if sqlstate == "42P01" or "Invalid object name" in str(error):
        return f"{_database()}: {_one_line(error)} -- run `manage.py migrate` first"
    if sqlstate[:2] in ("08", "53") or sqlstate[:4] == "57P0" or "server closed the connection" in str(error):
        return f"{_database()} went away: {_one_line(error)} -- {_advice()}"
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def _was_connecting(error: BaseException) -> bool:
    """Whether a database backend raised `error` while it opened a connection; drivers disagree about the class."""
    return any(
        frame.f_code.co_name in ("get_new_connection", "get_connection_params")
        for frame, _ in traceback.walk_tb(error.__traceback__)
    )


def _is_embedded() -> bool:
    return bool(connections.settings["default"]["ENGINE"] == "project.embedded_backend")


def _advice() -> str:
    return _CHECK_LOG if _is_embedded() else _CHECK_URL


def _database() -> str:
    """The default database by name, without its password."""
    if _is_embedded():
        return "the embedded PostgreSQL"
    settings = connections.settings["default"]
    host = settings.get("HOST") or "localhost"
    port = f":{settings['PORT']}" if settings.get("PORT") else ""
    user = f" as user {settings['USER']}" if settings.get("USER") else ""
    return f"the database {settings['NAME']} on {host}{port}{user}"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
