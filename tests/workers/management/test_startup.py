"""What a worker command checks before it starts processes."""

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
from django.core.management import CommandError
from django.core.management.base import BaseCommand
from django.db import connection

from tests.testapp.models import AtMostOnce, Leased, Urgent
from workers.management.startup import check_pool

QUEUES = [Leased, Urgent, AtMostOnce]


@pytest.fixture
def command() -> BaseCommand:
    return BaseCommand(stderr=StringIO(), no_color=True)


def pool(monkeypatch: pytest.MonkeyPatch, value: Any) -> None:
    options = connection.settings_dict.get("OPTIONS", {})
    monkeypatch.setitem(connection.settings_dict, "OPTIONS", {**options, "pool": value})


@pytest.mark.parametrize("value", [True, {"min_size": 4}, {"min_size": 1, "max_size": 6}])
def test_a_pool_too_small_for_any_message_is_an_error(
    monkeypatch: pytest.MonkeyPatch, command: BaseCommand, value: Any
) -> None:
    pool(monkeypatch, value)

    with pytest.raises(CommandError, match=r"pool of database 'default' .* needs 12: 3 for the pumps, 6 for receivers"):
        check_pool(command, "default", QUEUES, 2)


def test_a_pool_smaller_than_the_formula_is_a_warning(monkeypatch: pytest.MonkeyPatch, command: BaseCommand) -> None:
    pool(monkeypatch, {"max_size": 7})
    check_pool(command, "default", QUEUES, 2)

    assert "has at most 7 connections (OPTIONS['pool']), and a worker process needs 12" in command.stderr.getvalue()


@pytest.mark.parametrize("value", [None, False, {"max_size": 12}])
def test_no_pool_or_a_large_one_is_no_line(monkeypatch: pytest.MonkeyPatch, command: BaseCommand, value: Any) -> None:
    pool(monkeypatch, value)
    check_pool(command, "default", QUEUES, 2)

    assert command.stderr.getvalue() == ""
