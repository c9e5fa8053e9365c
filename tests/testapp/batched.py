"""Queues whose messages are handled several at a time."""

from __future__ import annotations

from datetime import timedelta

from queueapp import Queue, Semantics


class Together(Queue):
    """Several messages a transaction."""

    class Delivery:
        semantics = Semantics.TRANSACTIONAL
        transaction_size = 50
        retry_delay = timedelta(0)


class Several(Queue):
    """Consumers of several messages a call."""

    class Delivery:
        lease_period = timedelta(seconds=5)


class SeveralTransactional(Queue):
    class Delivery:
        semantics = Semantics.TRANSACTIONAL


class InSets(Queue):
    """One consumer, of whole sets."""

    class Delivery:
        semantics = Semantics.TRANSACTIONAL
        retry_delay = timedelta(0)
