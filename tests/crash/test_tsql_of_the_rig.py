"""What the rig says to a SQL Server is T-SQL; the databases, the ledger and the oracle of a scene are run there by the tests
that are marked ``on_both``."""

from __future__ import annotations

import pytest
from sqlglot import exp

from tests.queueapp.sql.tsql import parsed

from .rig.sqlserver import DROP, MAKE, SESSIONS, SqlServer
from .workload.ledger import QUEUES, WORDS

WORDS_OF_IT = WORDS["microsoft"]


@pytest.mark.parametrize(
    "statement",
    [
        *WORDS_OF_IT.tables,
        WORDS_OF_IT.sent,
        WORDS_OF_IT.here,
        SESSIONS,
        f"SELECT count(*) FROM queueapp_delayedmessage WHERE due < {WORDS_OF_IT.far_future}",
        *(one.format("crash_1_scene_1") for one in MAKE),
        DROP[1].format("crash_1_scene_1"),
    ],
)
def test_statement_is_read_completely(statement: str) -> None:
    assert len(parsed(statement.replace("%s", "?"))) == 1


def test_the_oracle_looks_where_it_looks_on_postgresql() -> None:
    def tables(vendor: str, dialect: str) -> set[str]:
        from sqlglot import parse_one

        return {one.name for one in parse_one(WORDS[vendor].here, dialect=dialect).find_all(exp.Table)} - {"p"}

    assert tables("microsoft", "tsql") == tables("postgresql", "postgres") >= set(QUEUES.values())


def test_a_scene_lies_in_a_database_of_its_own_and_may_be_reached_through_a_proxy() -> None:
    server = SqlServer("mssql://sa:p%40ss@db.example/queueapp?TrustServerCertificate=yes")
    direct, proxied = server.url("scene_1"), server.url("scene_1", port=4711)
    assert direct.startswith("mssql://sa:p%40ss@db.example/crash_")
    assert direct.endswith("_scene_1?TrustServerCertificate=yes")
    assert "@127.0.0.1:4711/crash_" in proxied
    assert (server.host, server.port) == ("db.example", 1433)
