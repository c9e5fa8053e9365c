"""``QueueTestMixin`` for Django's test cases."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from .kit import Kit


class QueueTestMixin:
    """``self.queues`` is a ``Kit``. For ``TestCase`` and ``TransactionTestCase``, before them among the bases.

    >>> class OrderTests(QueueTestMixin, TestCase):
    ...     def test_an_order_is_shipped(self):
    ...         place_order()
    ...         self.queues.drain()
    """

    def setUp(self) -> None:
        # Before the test's own: what its setUp sends in eager mode is seen as well.
        kit = self.queues
        test: Any = self
        test.addCleanup(kit.close)
        super().setUp()  # type: ignore[misc]

    @cached_property
    def queues(self) -> Kit:
        """What this test does with queues."""
        return Kit()
