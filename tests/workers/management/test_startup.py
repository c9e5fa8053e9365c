"""What a worker command checks before it starts processes."""

from __future__ import annotations

from collections.abc import Iterator
from io import StringIO
from typing import Any

import pytest
from django.core.management import CommandError
from django.core.management.base import BaseCommand
from django.db import connection, connections

from queueapp.operations import connection_limits
from tests.testapp.models import AtMostOnce, Leased, Urgent
from workers.management.startup import check_connections, check_services_pool

pytestmark = pytest.mark.django_db
QUEUES = [Leased, Urgent, AtMostOnce]


@pytest.fixture
def command() -> BaseCommand:
    return BaseCommand(stderr=StringIO(), no_color=True)


@pytest.fixture
def limited_role() -> Iterator[str]:
    """The session belongs to a role that may have three connections."""
    if connection.vendor != "postgresql":
        pytest.skip("roles with a CONNECTION LIMIT are PostgreSQL's")
    with connection.cursor() as cursor:
        cursor.execute("CREATE ROLE queueapp_limited CONNECTION LIMIT 3")
        cursor.execute("SET SESSION AUTHORIZATION queueapp_limited")
    try:
        yield "queueapp_limited"
    finally:
        with connection.cursor() as cursor:
            cursor.execute("RESET SESSION AUTHORIZATION")


def pool(monkeypatch: pytest.MonkeyPatch, value: Any) -> None:
    options = connection.settings_dict.get("OPTIONS", {})
    monkeypatch.setitem(connection.settings_dict, "OPTIONS", {**options, "pool": value})


@pytest.mark.parametrize("value", [True, {"min_size": 4}, {"min_size": 1, "max_size": 6}])
def test_a_pool_too_small_for_any_message_is_an_error(
    monkeypatch: pytest.MonkeyPatch, command: BaseCommand, value: Any
) -> None:
    pool(monkeypatch, value)

    with pytest.raises(CommandError, match=r"pool of database 'default' .* needs 12: 3 for the pumps, 6 for receivers"):
        check_connections(command, "default", QUEUES, concurrency=2)


def test_a_pool_smaller_than_the_formula_is_a_warning(monkeypatch: pytest.MonkeyPatch, command: BaseCommand) -> None:
    pool(monkeypatch, {"max_size": 7})
    check_connections(command, "default", QUEUES, concurrency=2)

    assert "has at most 7 connections (OPTIONS['pool']), and a worker process needs 12" in command.stderr.getvalue()


@pytest.mark.parametrize("value", [None, False, {"max_size": 12}])
def test_no_pool_or_a_large_one_is_no_line(monkeypatch: pytest.MonkeyPatch, command: BaseCommand, value: Any) -> None:
    pool(monkeypatch, value)
    check_connections(command, "default", QUEUES, concurrency=2)

    assert command.stderr.getvalue() == ""


def test_a_tree_larger_than_the_server_is_a_warning_with_both_numbers(command: BaseCommand) -> None:
    needed = connection_limits.of_tree(QUEUES, 200, 2)
    check_connections(command, "default", QUEUES, processes=200, concurrency=2)

    (line,) = command.stderr.getvalue().splitlines()
    assert "the server accepts " in line
    assert f"this process tree needs up to {needed} to database 'default'" in line
    assert "or use fewer --processes" in line


def test_a_limit_of_the_user_is_a_warning_with_the_statement_that_lifts_it(
    command: BaseCommand, limited_role: str
) -> None:
    check_connections(command, "default", [Leased], concurrency=2)

    (line,) = command.stderr.getvalue().splitlines()
    assert f"the user {limited_role} may have 3 connections (CONNECTION LIMIT)" in line
    assert f"Remedy: ALTER ROLE {limited_role} CONNECTION LIMIT -1" in line


def test_a_limit_of_the_database_is_a_warning_with_the_statement_that_lifts_it(
    command: BaseCommand, limited_role: str
) -> None:
    name = connection.ops.quote_name(connection.settings_dict["NAME"])
    with connection.cursor() as cursor:
        cursor.execute("RESET SESSION AUTHORIZATION")
        cursor.execute(f"ALTER ROLE {limited_role} CONNECTION LIMIT -1")
        cursor.execute(f"ALTER DATABASE {name} CONNECTION LIMIT 4")
        cursor.execute(f"SET SESSION AUTHORIZATION {limited_role}")
    check_connections(command, "default", [Leased], concurrency=2)

    (line,) = command.stderr.getvalue().splitlines()
    assert " accepts 4 connections (CONNECTION LIMIT)" in line
    assert " CONNECTION LIMIT -1, or use fewer" in line


def test_connections_in_use_are_not_free_for_a_start() -> None:
    if connection.vendor != "postgresql":
        pytest.skip("the sessions of others are not visible to each user on SQL Server")
    second_connection = connections.create_connection("default")
    second_connection.ensure_connection()
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT current_setting('max_connections')::int")
            (limit,) = cursor.fetchone()
        assert connection_limits.server_shortfalls("default", limit) == []
        (found,) = connection_limits.server_shortfalls("default", limit, free=True)
        assert " are in use now" in found.problem
    finally:
        second_connection.close()


def test_a_pool_smaller_than_the_services_of_the_dispatcher_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, command: BaseCommand
) -> None:
    """With two connections delayed messages stayed, and the log said that the database does not answer."""
    pool(monkeypatch, {"max_size": 2})
    check_services_pool(command, "default", maintenance=False)

    assert "has at most 2 connections (OPTIONS['pool']), and the dispatcher process needs 3" in (
        command.stderr.getvalue()
    )


@pytest.mark.parametrize("value", [None, {"max_size": 30}])
def test_no_pool_or_a_large_one_is_no_line_about_services(
    monkeypatch: pytest.MonkeyPatch, command: BaseCommand, value: Any
) -> None:
    pool(monkeypatch, value)
    check_services_pool(command, "default", maintenance=True)

    assert command.stderr.getvalue() == ""
