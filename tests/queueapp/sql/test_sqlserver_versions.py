"""Which SQL Servers are accepted, by what they say of themselves."""

from __future__ import annotations

import pytest

from queueapp.errors import UnsupportedServer
from queueapp.sql.sqlserver.backend import SqlServerBackend
from tests.queueapp.sql.tsql import Recorder, never_connected


@pytest.mark.parametrize(
    ("version", "edition", "level", "named"),
    [("13.0.5026.0", 3, 130, "13.0.5026.0"), ("12.0.2000.8", 2, 150, "12.0.2000.8"), ("15.0.4000.0", 2, 120, "level 120"),  # noqa: E501
     ("12.0.2000.8", 5, 110, "Azure SQL Database 12.0.2000.8")],
)  # fmt: skip
def test_server_that_is_too_old_is_refused_by_its_version(version: str, edition: int, level: int, named: str) -> None:
    connection = never_connected(Recorder(answers=[[(version, edition, level)]]))
    with pytest.raises(UnsupportedServer, match=named):
        SqlServerBackend().check_server(connection)


@pytest.mark.parametrize(
    ("version", "edition", "level"),
    [("14.0.1000.169", 2, 130), ("16.0.1000.6", 3, 160), ("12.0.2000.8", 5, 150), ("12.0.2000.8", 8, 130)],
)
def test_server_that_is_new_enough_is_accepted(version: str, edition: int, level: int) -> None:
    recorder = Recorder(answers=[[(version, edition, level)]])
    SqlServerBackend().check_server(never_connected(recorder))
    assert len(recorder.statements) == 1
