"""What DATABASE_URL may say, and that the error for a mistake in it hides the password."""

import pytest
from django.core.exceptions import ImproperlyConfigured

from project.database import EMBEDDED_NAME, database


@pytest.mark.parametrize("url", [None, ""])
def test_without_a_url_the_embedded_database_is_used(url: str | None) -> None:
    entry = database(url)
    assert entry["ENGINE"] == "project.embedded_backend"
    assert entry["NAME"] == EMBEDDED_NAME


@pytest.mark.parametrize("scheme", ["postgresql", "postgres"])
def test_postgresql_url_names_every_part(scheme: str) -> None:
    entry = database(f"{scheme}://ann:s%40cret%2F@db.example:6432/shop?sslmode=require&application_name=web")
    assert entry["ENGINE"] == "django.db.backends.postgresql"
    assert (entry["HOST"], entry["PORT"], entry["NAME"]) == ("db.example", "6432", "shop")
    assert (entry["USER"], entry["PASSWORD"]) == ("ann", "s@cret/")
    assert entry["OPTIONS"]["sslmode"] == "require"
    assert entry["OPTIONS"]["application_name"] == "web"


def test_postgresql_socket_directory_is_given_as_host_in_the_query() -> None:
    entry = database("postgresql://postgres@/queueapp?host=/tmp/queueapp-x")
    assert (entry["HOST"], entry["PORT"], entry["USER"]) == ("/tmp/queueapp-x", "", "postgres")
    assert "host" not in entry["OPTIONS"]


def test_ipv6_host_is_taken_without_its_brackets() -> None:
    assert database("postgresql://[::1]:5433/shop")["HOST"] == "::1"


@pytest.mark.parametrize("url", [None, "postgresql://h/shop"])
def test_postgresql_connections_bind_on_the_server_and_are_checked_before_reuse(url: str | None) -> None:
    entry = database(url)
    assert entry["OPTIONS"]["server_side_binding"] is True
    assert entry["CONN_HEALTH_CHECKS"] is True


@pytest.mark.parametrize("scheme", ["mssql", "sqlserver"])
def test_sqlserver_url_uses_the_driver_that_comes_with_its_package(scheme: str) -> None:
    entry = database(f"{scheme}://sa:p%3Bw@db.example:1433/shop")
    assert entry["ENGINE"] == "mssql"
    assert (entry["HOST"], entry["PORT"], entry["NAME"]) == ("db.example", "1433", "shop")
    assert (entry["USER"], entry["PASSWORD"]) == ("sa", "p;w")
    assert entry["OPTIONS"]["python_driver"] == "mssql_python"


def test_sqlserver_query_holds_backend_options_and_keywords_of_the_connection_string() -> None:
    options = database("mssql://h/shop?query_timeout=30&Encrypt=yes&TrustServerCertificate=yes")["OPTIONS"]
    assert options["query_timeout"] == 30
    assert options["extra_params"] == "Encrypt=yes;TrustServerCertificate=yes"


def test_sqlserver_driver_of_the_system_is_used_when_it_is_named() -> None:
    options = database("mssql://h/shop?driver=ODBC+Driver+18+for+SQL+Server")["OPTIONS"]
    assert options["driver"] == "ODBC Driver 18 for SQL Server"
    assert "python_driver" not in options


def test_value_of_a_sqlserver_keyword_cannot_smuggle_in_another() -> None:
    options = database("mssql://h/shop?ServerCertificate=a%3BEncrypt%3Dno%7D")["OPTIONS"]
    assert options["extra_params"] == "ServerCertificate={a;Encrypt=no}}}"


def test_name_of_a_sqlserver_keyword_cannot_smuggle_in_another() -> None:
    with pytest.raises(ImproperlyConfigured, match="not the name of an option"):
        database("mssql://h/shop?Encrypt%3Dno%3BX=1")


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("mysql://ann:hunter2@h/shop", "'mysql'"),
        ("shop", "does not start with a kind of database"),
        ("postgresql://ann:hunter2@h", "names no database"),
        ("postgresql://ann:hunter2@h/", "names no database"),
        ("postgresql://ann:hunter2@h:70000/shop", "Port out of range"),
        ("postgresql://ann:hunter2@h:port/shop", "cannot be read"),
        ("postgresql://ann:hunter2@[::1/shop", "cannot be read"),
        ("mssql://ann:hunter2@h", "names no database"),
        ("mssql://ann:hunter2@h/shop?query_timeout=soon", "query_timeout"),
    ],
)
def test_unusable_url_is_refused_in_one_line_without_its_password(url: str, complaint: str) -> None:
    with pytest.raises(ImproperlyConfigured) as caught:
        database(url)
    message = str(caught.value)
    assert complaint in message
    assert "hunter2" not in message
    assert len(message.splitlines()) == 1
