"""Queues over journaled topics. The tests say which topics those are (``QUEUEAPP["JOURNAL"]``)."""

from datetime import timedelta

from queueapp import Queue, Semantics


class Recovered(Queue):
    """Everything that was ever published to its topic."""

    class Delivery:
        underlying_topic = "journaled.orders"
        lease_period = timedelta(seconds=5)


class Deep(Queue):
    """A thousand active messages, the others in the journal."""

    class Delivery:
        underlying_topic = "journaled.deep"
        target_queue_depth = 1000
        semantics = Semantics.TRANSACTIONAL


class Wide(Queue):
    """Several topics, by a regular expression."""

    class Delivery:
        underlying_topic = "^journaled[.](orders|wide)"
        default_publish_target = "journaled.wide"
