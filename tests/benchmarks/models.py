"""Queues and tables of the benchmarks; made by ``migrate --run-syncdb``, without migrations."""

from datetime import timedelta

from django.db import models

from queueapp import Queue, Semantics

# A worker of these looks for messages when it is woken, so that a clock can be started with the wake-up.
_UNTIL_WOKEN = timedelta(hours=1)


class Leased(Queue):
    class Delivery:
        semantics = Semantics.AT_LEAST_ONCE
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


class Addressed(Queue):
    """One row per message and consumer."""

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


class Entry(models.Model):
    """What a handler with a business row writes."""

    number = models.BigIntegerField()
    text = models.CharField(max_length=200)


IDLE = [type(f"Idle{n}", (Queue,), {"__module__": __name__, "__doc__": "An empty queue."}) for n in range(1, 11)]
