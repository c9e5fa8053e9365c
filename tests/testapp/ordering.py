"""Queues with a priority of 64 bits and with barriers, one per semantics."""

from datetime import timedelta

from queueapp import FairnessModel, Queue, Semantics


class Ranked(Queue):
    """Any number is a priority."""

    class Delivery:
        priority = "/price"
        lease_period = timedelta(seconds=5)


class RankedTransactional(Queue):
    class Delivery:
        priority = "/price"
        semantics = Semantics.TRANSACTIONAL


class RankedAtMostOnce(Queue):
    class Delivery:
        priority = "/price"
        semantics = Semantics.AT_MOST_ONCE


class Fenced(Queue):
    """A sender says which message is a barrier."""

    class Delivery:
        barriers = True
        lease_period = timedelta(seconds=5)


class FencedTransactional(Queue):
    class Delivery:
        barriers = True
        semantics = Semantics.TRANSACTIONAL


class FencedAtMostOnce(Queue):
    class Delivery:
        barriers = True
        semantics = Semantics.AT_MOST_ONCE


class FencedAddressed(Queue):
    """A barrier is one for all recipients."""

    class Delivery:
        barriers = True
        recipients = True
        lease_period = timedelta(seconds=5)


class FencedByExpression(Queue):
    """An expression says which message is a barrier."""

    class Delivery:
        barrier_expression = "/last"
        lease_period = timedelta(seconds=5)


class FencedCapped(Queue):
    """Barriers and a limit: a barrier takes no room in it."""

    class Delivery:
        barriers = True
        max_backlog = 3
        lease_period = timedelta(seconds=5)


class FencedInTurns(Queue):
    """Barriers, and messages that are shared out."""

    class Delivery:
        barriers = True
        fairness_model = FairnessModel.ROUND_ROBIN
        max_per_subscription_backlog = 3
        lease_period = timedelta(seconds=5)


class RankedCapped(Queue):
    class Delivery:
        priority = "/price"
        max_backlog = 3
        lease_period = timedelta(seconds=5)


class RankedInTurns(Queue):
    class Delivery:
        priority = "/price"
        fairness_model = FairnessModel.ROUND_ROBIN
        max_per_subscription_backlog = 3
        lease_period = timedelta(seconds=5)
