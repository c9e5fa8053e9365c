"""Says in one line what is wrong with the environment of a command, and what to do next.

Only errors whose cause lies outside the code are described; for everything else the traceback is the best report.
"""

from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, OperationalError, connections
from django.db.utils import InterfaceError

_SQLSTATE_INSUFFICIENT_PRIVILEGE = "42501"
_MSSQL_PERMISSION_DENIED = "permission was denied"


def describe(error: BaseException) -> str | None:
    """One line for a mistake of configuration, reach or permission, or None when `error` is something else."""
    if isinstance(error, ImproperlyConfigured):
        return _one_line(error)
    if isinstance(error, OperationalError | InterfaceError):
        return (
            f"{_where()} cannot be used: {_one_line(error)} -- check that the server runs and that DATABASE_URL "
            "names it (unset it to use the embedded PostgreSQL)"
        )
    if isinstance(error, DatabaseError) and _is_missing_permission(error):
        return (
            f"{_where()}: {_one_line(error)} -- grant that right to the user of DATABASE_URL, or name another user there"
        )
    return None


def _is_missing_permission(error: DatabaseError) -> bool:
    if getattr(error.__cause__, "sqlstate", None) == _SQLSTATE_INSUFFICIENT_PRIVILEGE:
        return True
    return _MSSQL_PERMISSION_DENIED in str(error)


def _where() -> str:
    """The default database without its password."""
    settings = connections.settings["default"]
    if settings["ENGINE"] == "project.embedded_backend":
        return "the embedded database"
    host = settings.get("HOST") or "localhost"
    port = f":{settings['PORT']}" if settings.get("PORT") else ""
    user = f" as user {settings['USER']}" if settings.get("USER") else ""
    return f"the database {settings['NAME']} on {host}{port}{user}"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
