"""The parser that keeps the T-SQL statements honest refuses what is none."""

from __future__ import annotations

import pytest
from sqlglot.errors import ParseError

from tests.queueapp.sql.tsql import parsed


@pytest.mark.parametrize(
    "sql",
    [
        "DELETE FROM m OUTPUT deleted.[seq] FROM",
        "WITH m AS (SELECT TOP (?) [seq] FROM [q] WITH (UPDLOCK ORDER BY [seq]) DELETE FROM m",
        "UPDATE m SET [a] = ? [b] = ?",
        "SELECT TOP (?) [seq] FROM [q] ORDER [seq]",
        "BULK INSERT [q] FROM 'file'",
        "SELECT 1; WAITFOR DELAY '00:00:01'",
    ],
)
def test_parser_is_not_easily_pleased(sql: str) -> None:
    with pytest.raises((ParseError, AssertionError)):
        parsed(sql)
