"""Queues and tables of the benchmarks; made by ``migrate --run-syncdb``, without migrations."""

from datetime import timedelta

from django.db import models

from queueapp import FairnessModel, Ordering, Queue, Semantics

# A worker of these looks for messages when it is woken, so that a clock can be started with the wake-up.
_UNTIL_WOKEN = timedelta(hours=1)

#: Levels of the queue that is compared with 64 bits.
LEVELS = 10
SHARED_TOPIC, KEPT_TOPIC = "shared", "kept"


class Leased(Queue):
    class Delivery:
        semantics = Semantics.AT_LEAST_ONCE
        peek_delay = _UNTIL_WOKEN


class Ordered(Queue):
    """Messages with one key are handled in order."""

    class Delivery:
        ordering = Ordering.HOLD
        peek_delay = _UNTIL_WOKEN


class Shared(Queue):
    """Tenants take turns."""

    class Delivery:
        fair_by = "tenant"
        peek_delay = _UNTIL_WOKEN


class LimitedPerKey(Queue):
    """The same, and a tenant has a limit, which is not reached."""

    class Delivery:
        fair_by = "tenant"
        max_concurrent_per_key = 1000
        peek_delay = _UNTIL_WOKEN


class RatedPerKey(Queue):
    """The same, and a tenant has a rate, which is not reached."""

    class Delivery:
        fair_by = "tenant"
        rate_per_key = "1000000/s"
        peek_delay = _UNTIL_WOKEN


class Grouped(Queue):
    """Its messages are members of a group."""

    class Delivery:
        groups = True
        peek_delay = _UNTIL_WOKEN


class Ledgered(Queue):
    """Counts what comes and goes."""

    class Delivery:
        ledger = True
        peek_delay = _UNTIL_WOKEN


class LedgeredTransactional(Queue):
    class Delivery:
        semantics = Semantics.TRANSACTIONAL
        concurrency = 4
        ledger = True
        peek_delay = _UNTIL_WOKEN


class Keyed(Queue):
    """Of those with one key one waits."""

    class Delivery:
        dedupe_key = True
        peek_delay = _UNTIL_WOKEN


class Encrypted(Queue):
    class Delivery:
        encoding = ("encrypted",)
        peek_delay = _UNTIL_WOKEN


class AtMostOnce(Queue):
    class Delivery:
        semantics = Semantics.AT_MOST_ONCE
        peek_delay = _UNTIL_WOKEN


class Transactional(Queue):
    class Delivery:
        semantics = Semantics.TRANSACTIONAL
        concurrency = 4
        peek_delay = _UNTIL_WOKEN


class TransactionalAlone(Queue):
    """One thread, one message a transaction; and the two with several of them."""

    class Delivery:
        semantics = Semantics.TRANSACTIONAL
        concurrency = 1
        peek_delay = _UNTIL_WOKEN


class Together(Queue):
    class Delivery:
        semantics = Semantics.TRANSACTIONAL
        transaction_size = 50
        concurrency = 4
        peek_delay = _UNTIL_WOKEN


class TogetherAlone(Queue):
    class Delivery:
        semantics = Semantics.TRANSACTIONAL
        transaction_size = 50
        concurrency = 1
        peek_delay = _UNTIL_WOKEN


class InSets(Queue):
    """One consumer of whole sets, and one that reads a field of each body."""

    class Delivery:
        semantics = Semantics.TRANSACTIONAL
        peek_delay = _UNTIL_WOKEN


class InSetsOfFields(Queue):
    class Delivery:
        semantics = Semantics.TRANSACTIONAL
        peek_delay = _UNTIL_WOKEN


class InBatches(Queue):
    """A consumer of a hundred messages a call."""

    class Delivery:
        peek_delay = _UNTIL_WOKEN


class Addressed(Queue):
    """One row per message and consumer."""

    class Delivery:
        recipients = True
        peek_delay = _UNTIL_WOKEN


class Copied(Queue):
    """Three consumers have a copy each of what is sent to all."""

    class Delivery:
        recipients = True
        peek_delay = _UNTIL_WOKEN


class Deep(Queue):
    """Holds millions."""


class Prompt(Queue):
    """As a user gets it: latency."""


class SteadyLeased(Queue):
    """The three semantics under the steady load of the soak test, all else as a user gets it."""


class SteadyTransactional(Queue):
    class Delivery:
        semantics = Semantics.TRANSACTIONAL


class SteadyAtMostOnce(Queue):
    class Delivery:
        semantics = Semantics.AT_MOST_ONCE


class Capped(Queue):
    """The options of AMPS, one at a time, beside ``Leased``."""

    class Delivery:
        max_backlog = 10_000
        peek_delay = _UNTIL_WOKEN


class Fair(Queue):
    class Delivery:
        fairness_model = FairnessModel.PROPORTIONAL
        max_per_subscription_backlog = 5_000
        peek_delay = _UNTIL_WOKEN


class Defaults(Queue):
    """What AMPS has by default: in proportion, one message in flight in each process."""

    class Delivery:
        fairness_model = FairnessModel.PROPORTIONAL
        max_per_subscription_backlog = 1
        peek_delay = _UNTIL_WOKEN


class Tight(Queue):
    """Fewer messages in flight than receivers; and the same without a limit."""

    class Delivery:
        max_backlog = 7
        concurrency = 8
        peek_delay = _UNTIL_WOKEN


class Loose(Queue):
    class Delivery:
        concurrency = 8
        peek_delay = _UNTIL_WOKEN


class Ranked(Queue):
    class Delivery:
        message_type = "json"
        priority = "/number"
        peek_delay = _UNTIL_WOKEN


class Levelled(Queue):
    class Delivery:
        priorities = LEVELS
        peek_delay = _UNTIL_WOKEN


class Fenced(Queue):
    """A queue with barriers, of which none comes."""

    class Delivery:
        barrier_expression = "/number < 0"
        peek_delay = _UNTIL_WOKEN


class First(Queue):
    """The three that one publish goes to, and that three sends go to."""

    class Delivery:
        underlying_topic = SHARED_TOPIC


class Second(Queue):
    class Delivery:
        underlying_topic = SHARED_TOPIC


class Third(Queue):
    class Delivery:
        underlying_topic = SHARED_TOPIC


class Kept(Queue):
    """Of a topic that is journaled, and one of a topic that is not."""

    class Delivery:
        underlying_topic = KEPT_TOPIC


class Unkept(Queue):
    class Delivery:
        underlying_topic = "unkept"


class Entry(models.Model):
    """What a handler with a business row writes."""

    number = models.BigIntegerField()
    text = models.CharField(max_length=200)


IDLE = [type(f"Idle{n}", (Queue,), {"__module__": __name__, "__doc__": "An empty queue."}) for n in range(1, 11)]
