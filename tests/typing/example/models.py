"""Queues and messages of the example."""

from __future__ import annotations

import msgspec

from queueapp import Queue, Semantics


class Orders(Queue):
    class Meta:
        app_label = "example"

    class Delivery:
        semantics = Semantics.TRANSACTIONAL
        priorities = 3


class Placed(msgspec.Struct):
    number: int
