"""The metrics of a site that has a token, with nothing remembered from another test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from queueapp.metrics.permissions import remembered

TOKEN = "a token of the tests"


@pytest.fixture
def anew(settings: Any) -> Iterator[None]:
    settings.QUEUEAPP = {"METRICS_TOKEN": TOKEN}
    remembered.forget()
    yield
    remembered.forget()
