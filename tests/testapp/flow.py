"""Queues with limits and fairness; imported by ``models``."""

from datetime import timedelta

from queueapp import FairnessModel, Ordering, Queue, Semantics


class Capped(Queue):
    """At most five messages are out at a time."""

    class Delivery:
        max_backlog = 5
        lease_period = timedelta(seconds=5)


class CappedUrgent(Queue):
    """The same with levels."""

    class Delivery:
        max_backlog = 5
        priorities = 3


class CappedTransactional(Queue):
    class Delivery:
        semantics = Semantics.TRANSACTIONAL
        max_backlog = 3


class CappedOnce(Queue):
    class Delivery:
        semantics = Semantics.AT_MOST_ONCE
        max_backlog = 3


class CappedEach(Queue):
    """At most four messages are with one process at a time."""

    class Delivery:
        max_per_subscription_backlog = 4
        lease_period = timedelta(seconds=5)


class InTurns(Queue):
    class Delivery:
        fairness_model = FairnessModel.ROUND_ROBIN
        max_per_subscription_backlog = 10
        lease_period = timedelta(seconds=5)


class InProportion(Queue):
    class Delivery:
        fairness_model = FairnessModel.PROPORTIONAL
        lease_period = timedelta(seconds=5)


class InTurnsOnce(Queue):
    class Delivery:
        semantics = Semantics.AT_MOST_ONCE
        fairness_model = FairnessModel.ROUND_ROBIN
        max_per_subscription_backlog = 10


class Rated(Queue):
    """At most forty messages a second."""

    class Delivery:
        rate = "40/s"
        lease_period = timedelta(seconds=5)


class RatedTransactional(Queue):
    class Delivery:
        semantics = Semantics.TRANSACTIONAL
        rate = "40/s"


class RatedOnce(Queue):
    class Delivery:
        semantics = Semantics.AT_MOST_ONCE
        rate = "40/s"


class Grouped(Queue):
    """Its messages may be members of groups."""

    class Delivery:
        groups = True
        lease_period = timedelta(seconds=5)


class GroupedTransactional(Queue):
    class Delivery:
        semantics = Semantics.TRANSACTIONAL
        groups = True


class GroupedTogether(Queue):
    class Delivery:
        semantics = Semantics.TRANSACTIONAL
        transaction_size = 20
        groups = True


class Ordered(Queue):
    """Messages with one key are handled in order."""

    class Delivery:
        ordering = Ordering.HOLD
        lease_period = timedelta(seconds=5)


class OrderedPassing(Queue):
    class Delivery:
        ordering = Ordering.PASS
        lease_period = timedelta(seconds=5)


class OrderedTransactional(Queue):
    class Delivery:
        semantics = Semantics.TRANSACTIONAL
        ordering = Ordering.HOLD
        lease_period = timedelta(seconds=5)
