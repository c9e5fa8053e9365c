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


class Shared(Queue):
    """Tenants take turns."""

    class Delivery:
        fair_by = "tenant"
        lease_period = timedelta(seconds=5)


class SharedTransactional(Queue):
    class Delivery:
        semantics = Semantics.TRANSACTIONAL
        fair_by = "tenant"
        lease_period = timedelta(seconds=5)


class LimitedPerKey(Queue):
    """At most two messages of a tenant are in flight."""

    class Delivery:
        fair_by = "tenant"
        max_concurrent_per_key = 2
        lease_period = timedelta(seconds=5)


class LimitedPerKeyTransactional(Queue):
    class Delivery:
        semantics = Semantics.TRANSACTIONAL
        fair_by = "tenant"
        max_concurrent_per_key = 2
        lease_period = timedelta(seconds=5)


class RatedPerKey(Queue):
    """Three messages of a tenant at once, and then one in ten minutes."""

    class Delivery:
        fair_by = "tenant"
        rate_per_key = "6/h"
        rate_burst_per_key = 3
        lease_period = timedelta(seconds=5)


class RatedPerKeyFast(Queue):
    class Delivery:
        fair_by = "tenant"
        rate_per_key = "20/s"
        lease_period = timedelta(seconds=5)


class RatedPerKeyTransactional(Queue):
    class Delivery:
        semantics = Semantics.TRANSACTIONAL
        fair_by = "tenant"
        rate_per_key = "20/s"
        lease_period = timedelta(seconds=5)


class Weighted(Queue):
    """The tenant "b" gets three messages for each one of another."""

    class Delivery:
        fair_by = "tenant"
        fair_weights = {"b": 3}
        lease_period = timedelta(seconds=5)


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


class Ledgered(Queue):
    """Counts what comes and goes."""

    class Delivery:
        ledger = True
        lease_period = timedelta(seconds=5)


class LedgeredTransactional(Queue):
    class Delivery:
        semantics = Semantics.TRANSACTIONAL
        ledger = True


class LedgeredTogether(Queue):
    class Delivery:
        semantics = Semantics.TRANSACTIONAL
        transaction_size = 20
        ledger = True


class LedgeredOnce(Queue):
    class Delivery:
        semantics = Semantics.AT_MOST_ONCE
        ledger = True


class LedgeredWholly(Queue):
    """With other options that change what sends and acks do."""

    class Delivery:
        ledger = True
        groups = True
        workflow = True
        priorities = 3
        lease_period = timedelta(seconds=5)


class Followed(Queue):
    """Its messages may have follow-ups."""

    class Delivery:
        workflow = True
        lease_period = timedelta(seconds=5)


class FollowedTransactional(Queue):
    class Delivery:
        semantics = Semantics.TRANSACTIONAL
        workflow = True


class FollowedTogether(Queue):
    """Many messages in one transaction, which may be members of groups as well."""

    class Delivery:
        semantics = Semantics.TRANSACTIONAL
        transaction_size = 20
        groups = True
        workflow = True


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
