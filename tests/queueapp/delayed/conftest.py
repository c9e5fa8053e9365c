"""Projects that are configured with a store of a third party."""

from __future__ import annotations

from typing import Any

import pytest

from tests.crash.conftest import scene, server, two  # noqa: F401 (two databases, and a server of their own)
from tests.queueapp.delayed.stores import SampleStore, WholeStore


@pytest.fixture
def _fresh_stores() -> None:
    SampleStore.reset()
    WholeStore.reset()


@pytest.fixture
def sample(settings: Any, _fresh_stores: None) -> type[SampleStore]:
    """As little as the interface asks for."""
    settings.QUEUEAPP = {"DELAYED_STORE": "tests.queueapp.delayed.stores.SampleStore"}
    return SampleStore


@pytest.fixture
def whole(settings: Any, _fresh_stores: None) -> type[WholeStore]:
    """With every verb."""
    settings.QUEUEAPP = {"DELAYED_STORE": "tests.queueapp.delayed.stores.WholeStore"}
    return WholeStore
