from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connection

from queueapp.sql.postgresql.raw.raw_statement import OpeningQuery


@pytest.fixture
def own_session() -> Iterator[None]:
    """A session that no other test has set or prepared anything in, nor will find what this one has."""
    connection.close()
    connection.ensure_connection()
    yield
    connection.close()


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One entry for each time that BEGIN went with the claim."""
    taken: list[None] = []
    fetch = OpeningQuery.fetch

    def counted(self: OpeningQuery, *arguments: Any) -> Any:
        taken.append(None)
        return fetch(self, *arguments)

    monkeypatch.setattr(OpeningQuery, "fetch", counted)
    return taken
