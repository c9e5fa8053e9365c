"""The metrics of a site that has a token, and an empty cache from another test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from queueapp.metrics.permissions import cached_stats

TOKEN = "a token of the tests"


@pytest.fixture
def anew(settings: Any) -> Iterator[None]:
    settings.QUEUEAPP = {"METRICS_TOKEN": TOKEN}
    cached_stats.clear()
    yield
    cached_stats.clear()
