"""What a worker process adds to the connection settings of the user."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import connections
from django.db.backends.signals import connection_created

from queueapp.services.connection_timeouts import prepare_connections


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> Any:
    """OPTIONS of the default database after a worker process has prepared its connections, given the user's."""
    connection = connections["default"]
    if connection.vendor != "postgresql":
        pytest.skip("PostgreSQL only")

    def prepared(**of_the_user: Any) -> dict[str, Any]:
        monkeypatch.setitem(connection.settings_dict, "OPTIONS", of_the_user)
        prepare_connections()
        return dict(connection.settings_dict["OPTIONS"])

    yield prepared
    connection_created.disconnect(dispatch_uid="queueapp.services.connection_timeouts")


def test_statements_that_handlers_repeat_are_prepared(options: Any) -> None:
    assert options(server_side_binding=True)["prepare_threshold"] == 5


def test_options_of_the_user_take_precedence(options: Any) -> None:
    found = options(prepare_threshold=None, connect_timeout=77)

    assert found["prepare_threshold"] is None
    assert found["connect_timeout"] == 77
    assert found["keepalives"] == 1


def test_nothing_is_prepared_where_that_is_turned_off(options: Any, settings: Any) -> None:
    settings.QUEUEAPP = {"PREPARED_STATEMENTS": False}

    assert "prepare_threshold" not in options()


def test_without_a_database_timeout_the_other_end_is_not_watched(options: Any, settings: Any) -> None:
    settings.QUEUEAPP = {"DATABASE_TIMEOUT": None}

    assert set(options()) == {"prepare_threshold"}
