"""Queues whose bodies are compressed or encrypted."""

from __future__ import annotations

from datetime import timedelta

from queueapp import Leasing, PublishTo, Queue, Semantics


class Smaller(Queue):
    """Compressed."""

    class Delivery:
        encoding = ("zlib",)
        leasing = Leasing.SUBLET
        lease_period = timedelta(seconds=5)


class Secret(Queue):
    """Compressed, then encrypted, with a copy for each consumer."""

    class Delivery:
        encoding = ("zstd", "encrypted")
        recipients = True
        lease_period = timedelta(seconds=5)


class SecretTransactional(Queue):
    class Delivery:
        semantics = Semantics.TRANSACTIONAL
        encoding = ("encrypted",)
        message_type = "msgpack"


class SecretOnce(Queue):
    class Delivery:
        semantics = Semantics.AT_MOST_ONCE
        encoding = ("encrypted",)


class SecretExpiring(Queue):
    """What it gives up is published to the queue of another semantics."""

    class Delivery:
        encoding = ("encrypted",)
        max_cancels = 1
        leasing = Leasing.SUBLET
        on_expired = PublishTo("SecretOnce")
        lease_period = timedelta(seconds=5)
