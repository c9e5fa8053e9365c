"""The page about several messages at once: its Python blocks run, on a real database."""

from __future__ import annotations

import pytest

from .pages import DOCS
from .running import run_blocks


@pytest.mark.django_db(transaction=True)
def test_the_blocks_of_the_page_run() -> None:
    with run_blocks(DOCS / "reference" / "batches.md") as module:
        assert module.Bookings.delivery.transaction_size == 50
        assert [row.body for row in module.Newsletters.objects.order_by("seq")] == [
            b'{"username":"ada","email":"ada@example.org"}'
        ] * 2
