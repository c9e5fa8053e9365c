"""A mistake of the environment is one line on stderr and exit code 1, and a mistake of the code is a traceback."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from project.embedded_postgres import EmbeddedServer, ensure_running
from project.paths import CHECKOUT


def manage(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("DATABASE_", "DJANGO_"))}
    return subprocess.run(
        [sys.executable, "manage.py", *arguments],
        cwd=CHECKOUT,
        env=clean | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def only_line(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 1, result
    [line] = result.stderr.splitlines()
    return line


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("mysql://h/shop", "kind 'mysql'"),
        ("postgresql://ann:hunter2@127.0.0.1:1/shop", "shop on 127.0.0.1:1 as user ann cannot be reached"),
        ("postgresql://ann:hunter2@127.0.0.1:1/shop?colour=red", "colour"),
    ],
)
def test_unusable_database_url_is_one_line(url: str, words: str) -> None:
    line = only_line(manage("migrate", DATABASE_URL=url))
    assert words in line
    assert "DATABASE" in line
    assert "hunter2" not in line


def test_sqlserver_that_cannot_be_reached_is_one_line() -> None:
    line = only_line(manage("migrate", DATABASE_URL="mssql://ann:hunter2@127.0.0.1:1/shop?connection_timeout=1"))
    assert "hunter2" not in line
    if "cannot be loaded" in line:  # a machine without the libraries that the driver takes from the system
        assert "apt-get install libodbc2" in line
    else:
        assert "shop on 127.0.0.1:1 as user ann cannot be reached" in line


def test_traceback_is_shown_where_it_is_asked_for() -> None:
    result = manage("migrate", "--traceback", DATABASE_URL="postgresql://127.0.0.1:1/shop")
    assert "Traceback" in result.stderr


@pytest.fixture
def server() -> EmbeddedServer:
    return ensure_running()


@pytest.fixture
def restricted_role(server: EmbeddedServer) -> Iterator[str]:
    """A role that may log in and nothing else, and a database of its name that belongs to another role."""
    name = f"test_restricted_{os.getpid()}"
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {name} LOGIN")
        connection.execute(f"CREATE DATABASE {name}")
        yield name
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")
        connection.execute(f"DROP ROLE {name}")


def test_missing_right_is_one_line(server: EmbeddedServer, restricted_role: str) -> None:
    url = server.url_of(restricted_role).replace("postgres@", f"{restricted_role}@")
    line = only_line(manage("migrate", DATABASE_URL=url))
    assert "permission denied" in line
    assert "grant that right" in line


def test_missing_database_is_one_line(server: EmbeddedServer) -> None:
    assert '"no_such_database" does not exist' in only_line(
        manage("migrate", DATABASE_URL=server.url_of("no_such_database"))
    )


def test_missing_tables_are_one_line(server: EmbeddedServer, restricted_role: str) -> None:
    line = only_line(manage("changepassword", "ann", DATABASE_URL=server.url_of(restricted_role)))
    assert "manage.py migrate" in line


def test_commands_that_need_no_database_start_none() -> None:
    with tempfile.TemporaryDirectory() as data:
        for arguments in (["--help"], ["check"], ["migrate", "--help"]):
            assert manage(*arguments, DATA_DIR=data).returncode == 0
        assert not Path(data, "postgres").exists()


PRODUCTION = {"DJANGO_ENV": "production", "SECRET_KEY": "k" * 20 + "".join(map(chr, range(48, 110)))}


def test_production_settings_pass_the_deployment_checks() -> None:
    result = manage("check", "--deploy", "--fail-level", "WARNING", ALLOWED_HOSTS="shop.example", **PRODUCTION)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("missing", ["SECRET_KEY", "ALLOWED_HOSTS"])
def test_production_without_its_secrets_does_not_start(missing: str) -> None:
    environment = PRODUCTION | {"ALLOWED_HOSTS": "shop.example", missing: ""}
    assert missing in only_line(manage("check", **environment))


@pytest.mark.parametrize(("name", "value"), [("DEBUG", "maybe"), ("DJANGO_ENV", "staging")])
def test_misspelt_setting_is_refused_with_what_is_accepted(name: str, value: str) -> None:
    line = only_line(manage("check", **{name: value}))
    assert name in line
    assert value in line
    assert "expected" in line


def test_development_key_is_made_once_and_readable_by_its_owner_only() -> None:
    with tempfile.TemporaryDirectory() as data:
        command = "import django.conf; print(django.conf.settings.SECRET_KEY)"
        environment = {
            **{name: value for name, value in os.environ.items() if name != "SECRET_KEY"},
            "DJANGO_SETTINGS_MODULE": "project.settings",
            "DATA_DIR": data,
        }
        keys = {
            subprocess.run(
                [sys.executable, "-c", command], cwd=CHECKOUT, env=environment, capture_output=True, check=True
            ).stdout
            for _ in range(2)
        }
        assert len(keys) == 1
        assert Path(data, "secret_key").stat().st_mode & 0o777 == 0o600
        assert os.listdir(data) == ["secret_key"]
