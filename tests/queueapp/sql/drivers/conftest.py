from __future__ import annotations

from collections.abc import Iterator

import pytest
from django.db import connection


@pytest.fixture
def own_session() -> Iterator[None]:
    """A session that no other test has set or prepared anything in, nor will find what this one has."""
    connection.close()
    connection.ensure_connection()
    yield
    connection.close()
