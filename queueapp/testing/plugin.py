"""The fixtures for pytest, with ``pytest-django``. An installed queueapp brings them along; a checkout names this
module in ``pytest_plugins``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .kit import Kit


@pytest.fixture
def queue_kit(db: None) -> Iterator[Kit]:
    """A ``queueapp.testing.Kit`` for this test."""
    from .kit import Kit  # only now: pytest loads this before Django's apps are there

    kit = Kit()
    yield kit
    kit.close()
