"""Turns DATABASE_URL into Django's DATABASES entry.

    unset or empty                                        the embedded PostgreSQL of this checkout
    postgresql://user:password@host:5432/name?sslmode=…   PostgreSQL; the query holds libpq's parameters, and
                                                          `host=/run/postgresql` names a socket directory
    mssql://user:password@host:1433/name?Encrypt=yes      SQL Server; the query holds keywords of the connection string
                                                          and the Django backend's options (driver, query_timeout, …)

`postgres://` and `postgresql://` mean the same, as do `mssql://` and `sqlserver://`. Percent-encode special
characters of the password. A URL that cannot be used raises `ImproperlyConfigured` with a text that never contains
the password.
"""

from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from django.core.exceptions import ImproperlyConfigured

EMBEDDED_NAME = "queueapp"
CONNECT_TIMEOUT_SECONDS = 10


def databases(url: str | None) -> dict[str, dict[str, Any]]:
    """Django's DATABASES for `url`; raises `ImproperlyConfigured` for a URL that names no usable database."""
    return {"default": database(url)}


def database(url: str | None) -> dict[str, Any]:
    """One entry of DATABASES for `url`, the embedded database where it is None or empty."""
    if not url:
        return _postgresql_entry("project.embedded_backend", name=EMBEDDED_NAME)
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ImproperlyConfigured(f"DATABASE_URL cannot be read: {error}. {_EXPECTED}") from None
    if parts.scheme in ("postgresql", "postgres"):
        return _postgresql(parts, port)
    if parts.scheme in ("mssql", "sqlserver"):
        return _sqlserver(parts, port)
    kind = (
        f"names a database of the kind {parts.scheme!r}" if parts.scheme else "does not start with a kind of database"
    )
    raise ImproperlyConfigured(f"DATABASE_URL {kind}. {_EXPECTED}")


_EXPECTED = (
    "Expected postgresql://user:password@host:5432/name or mssql://user:password@host:1433/name "
    "(special characters percent-encoded), or leave it unset for the embedded PostgreSQL"
)


def _postgresql(parts: SplitResult, port: int | None) -> dict[str, Any]:
    options: dict[str, Any] = dict(parse_qsl(parts.query, keep_blank_values=True))
    entry = _postgresql_entry("django.db.backends.postgresql", name=_name(parts))
    entry.update(_address(parts, port))
    for option, setting in (("host", "HOST"), ("port", "PORT"), ("user", "USER"), ("password", "PASSWORD")):
        if option in options:
            entry[setting] = options.pop(option)
    entry["OPTIONS"] |= {"connect_timeout": CONNECT_TIMEOUT_SECONDS} | options
    return entry


def _postgresql_entry(engine: str, name: str) -> dict[str, Any]:
    return {
        "ENGINE": engine,
        "NAME": name,
        # Values travel apart from the statement, which is what lets PostgreSQL keep prepared plans for the ORM too.
        "OPTIONS": {"server_side_binding": True},
        "CONN_MAX_AGE": None,
        "CONN_HEALTH_CHECKS": True,
    }


def _sqlserver(parts: SplitResult, port: int | None) -> dict[str, Any]:
    # Microsoft's own driver comes with its package; ODBC drivers of the system are used where `driver` names one.
    options: dict[str, Any] = {"connection_timeout": CONNECT_TIMEOUT_SECONDS}
    keywords = []
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name in _SQLSERVER_NUMBERS:
            options[name] = _number(name, value)
        elif name in _SQLSERVER_TEXTS:
            options[name] = value
        elif not name.replace(" ", "").isalnum():
            raise ImproperlyConfigured(f"{name!r} in DATABASE_URL is not the name of an option")
        else:
            keywords.append(f"{name}={_quoted_keyword_value(value)}")
    if "driver" not in options:
        options.setdefault("python_driver", "mssql_python")
    if keywords:
        options["extra_params"] = ";".join(keywords)
    return {
        "ENGINE": "mssql",
        "NAME": _name(parts),
        **_address(parts, port),
        "OPTIONS": options,
        "CONN_MAX_AGE": None,
        "CONN_HEALTH_CHECKS": True,
    }


# Options of the Django backend; every other parameter of the URL is a keyword of the connection string.
_SQLSERVER_TEXTS = ("driver", "python_driver", "isolation_level", "collation")
_SQLSERVER_NUMBERS = ("connection_timeout", "connection_retries", "connection_retry_backoff_time", "query_timeout")


def _number(name: str, value: str) -> int:
    if not value.isdecimal():
        raise ImproperlyConfigured(f"{name} in DATABASE_URL is {value!r}; expected a whole number of at least 0")
    return int(value)


def _quoted_keyword_value(value: str) -> str:
    """`value` as one value of a connection string, whatever it contains."""
    if any(character in value for character in ";{}=") or value != value.strip():
        return "{" + value.replace("}", "}}") + "}"
    return value


def _name(parts: SplitResult) -> str:
    name = unquote(parts.path.removeprefix("/"))
    if not name or "/" in name:
        raise ImproperlyConfigured(f"DATABASE_URL names no database after its host. {_EXPECTED}")
    return name


def _address(parts: SplitResult, port: int | None) -> dict[str, str]:
    return {
        "HOST": unquote(parts.hostname or ""),
        "PORT": str(port or ""),
        "USER": unquote(parts.username or ""),
        "PASSWORD": unquote(parts.password or ""),
    }
