"""The project-wide settings: ``QUEUEAPP = {...}`` in Django's settings, each with default and bounds.

A queue's ``class Delivery`` and a consumer's arguments come before these where they have the same name.
Reading never touches the database. ``checks.py`` reads everything once at start.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.conf import settings as django_settings
from django.core.signals import setting_changed

from .options import Option, read_all

SECOND = timedelta(seconds=1)

#: Receive tasks of a queue in one worker process.
MAX_CONCURRENCY = 256

OPTIONS: tuple[Option, ...] = (
    Option(
        "PEEK_DELAY",
        timedelta,
        SECOND,
        "How long a worker waits after an empty peek (NServiceBus' QueuePeeker.Delay). Above 10 s a warning is given.",
        low=timedelta(milliseconds=100),
        high=timedelta(hours=1),
        seconds=True,
    ),
    Option(
        "MAX_RECORDS_TO_PEEK",
        int,
        1000,
        "A peek counts at most so many waiting messages (NServiceBus' MaxRecordsToPeek).",
        low=1,
        high=1_000_000,
    ),
    Option("CONCURRENCY", int, 4, "Receive tasks (threads) per queue and worker process.", low=1, high=MAX_CONCURRENCY),
    Option(
        "ATTEMPTS", int, 5, "Attempts of a message before it is poison (AsyncMonolith's MaxAttempts).", low=1, high=1000
    ),
    Option(
        "RETRY_DELAY",
        timedelta,
        10 * SECOND,
        "Wait between two attempts (AsyncMonolith's AttemptDelay); 0 retries at once, in place.",
        low=timedelta(0),
        high=timedelta(days=30),
        seconds=True,
    ),
    Option(
        "RETRY_DELAY_INCREASE",
        timedelta,
        timedelta(0),
        "Added to the wait at each further attempt (delayed retries with increase).",
        low=timedelta(0),
        high=timedelta(days=30),
        seconds=True,
    ),
    Option(
        "RETRY_JITTER",
        float,
        0.0,
        "Share of a retry's wait that is added at random, so that messages that failed together do not come back together.",
        low=0.0,
        high=1.0,
    ),
    Option("IMMEDIATE_RETRIES", int, 0, "Attempts that are repeated at once before waits begin.", low=0, high=1000),
    Option(
        "TIMEOUT",
        timedelta,
        None,
        "Time limit of a handler (AsyncMonolith's DefaultConsumerTimeout); None: no limit.",
        low=timedelta(milliseconds=10),
        high=timedelta(hours=24),
        optional=True,
        seconds=True,
    ),
    Option(
        "WAKE_UPS",
        bool,
        True,
        "Tell sleeping workers of a commit that sent messages, and listen for it: NOTIFY on PostgreSQL, Service Broker on SQL "
        "Server.",
    ),
    Option(
        "WAKE_UP_INTERVAL",
        timedelta,
        timedelta(milliseconds=50),
        "A process that sends to a queue all the time, every 2 ms or more often, wakes its workers once in this time; one that "
        "sends less often wakes them each time.",
        low=timedelta(milliseconds=1),
        high=timedelta(seconds=10),
        seconds=True,
    ),
    Option(
        "PREPARED_STATEMENTS",
        bool,
        True,
        "Prepare the engine's own statements and, on workers' connections, what handlers repeat (`prepare_threshold` 5, where "
        "`OPTIONS` says nothing else; of use with `server_side_binding`). Names are made from the statement, so that a pooler "
        "cannot run another one in its place. Behind a pooler that passes names on as they are nothing is prepared anyway; "
        "False saves the look and the line in the log.",
    ),
    Option(
        "MAX_BATCH",
        int,
        500,
        "Most messages one receive task leases at once (on SQL Server batches stay under lock escalation).",
        low=1,
        high=3500,
    ),
    Option(
        "AT_MOST_ONCE_BATCH",
        int,
        500,
        "The same for an AT_MOST_ONCE queue. A batch is gone when it is received: a process that dies loses, per task, at most "
        "so many messages, and no more than it handles in BATCH_TARGET.",
        low=1,
        high=3500,
    ),
    Option(
        "MAX_BATCH_BYTES",
        int,
        16 * 1024 * 1024,
        "Most bytes of bodies that one receive task claims at once, about: a claim is sized by the average body of those "
        "before it, and one message is claimed however large it is.",
        low=64 * 1024,
        high=2**30,
    ),
    Option(
        "BATCH_TARGET",
        timedelta,
        timedelta(milliseconds=80),
        "A batch is sized so that handling it takes about this long.",
        low=timedelta(milliseconds=1),
        high=timedelta(seconds=30),
        seconds=True,
    ),
    Option(
        "HEARTBEAT_INTERVAL",
        timedelta,
        5 * SECOND,
        "How often a worker process says that it is alive.",
        low=timedelta(milliseconds=100),
        high=timedelta(minutes=10),
        seconds=True,
    ),
    Option(
        "DEAD_AFTER",
        timedelta,
        20 * SECOND,
        "A subscriber without a heartbeat for this long is dead: its leases are released.",
        low=timedelta(milliseconds=500),
        high=timedelta(hours=1),
        seconds=True,
    ),
    Option(
        "CAREFUL_PERIOD",
        timedelta,
        60 * SECOND,
        "For so long after a subscriber of a TRANSACTIONAL queue died without a goodbye each hand-out of that queue is recorded "
        "before its handler runs, for one commit more per 25 messages: a rollback leaves no trace of a message that kills its "
        "whole process tree. Leased messages carry their hand-outs themselves.",
        low=SECOND,
        high=timedelta(hours=24),
        seconds=True,
    ),
    Option(
        "THROTTLE_AFTER",
        int,
        0,
        "After so many consecutive failures of a queue's handlers it is received by one task with THROTTLE_WAIT between "
        "attempts, until one succeeds (an outage of something they all need); 0: off.",
        low=0,
        high=1_000_000,
    ),
    Option(
        "THROTTLE_WAIT",
        timedelta,
        SECOND,
        "Wait between attempts while throttled.",
        low=timedelta(milliseconds=1),
        high=timedelta(hours=1),
        seconds=True,
    ),
    Option(
        "WEDGED_AFTER",
        timedelta,
        10 * SECOND,
        "A handler that ignores its time limit for so much longer costs its process: it is drained and replaced.",
        low=timedelta(milliseconds=100),
        high=timedelta(hours=1),
        seconds=True,
    ),
    Option(
        "DATABASE_TIMEOUT",
        timedelta,
        30 * SECOND,
        "A worker gives a connection up when a statement of its own (peek, claim, ack, heartbeat, ...) is not answered for so "
        "long, and keepalives find a dead server or worker in about this time. Statements of handlers have the handler's "
        "time limit instead. None: as the operating system does, which may take hours.",
        low=SECOND,
        high=timedelta(hours=1),
        optional=True,
        seconds=True,
    ),
    Option(
        "SHUTDOWN_GRACE",
        timedelta,
        15 * SECOND,
        "How long a stopping worker lets running handlers finish before it cancels them.",
        low=timedelta(0),
        high=timedelta(hours=1),
        seconds=True,
    ),
    Option(
        "DISPATCH_BATCH",
        int,
        500,
        "Due delayed messages moved to their queues in one statement.",
        low=1,
        high=3500,
    ),
    Option(
        "DISPATCH_POLL",
        timedelta,
        5 * SECOND,
        "The delayed dispatcher looks again after this long at most, whatever it was told.",
        low=timedelta(milliseconds=50),
        high=timedelta(minutes=1),
        seconds=True,
    ),
    Option(
        "DELAYED_STORE",
        str,
        "queueapp.delayed.SqlDelayedStore",
        "Dotted path of the delayed store: a subclass of queueapp.delayed.DelayedStore, after NServiceBus' "
        "IDelayedMessageStore ([delayed_store.md](delayed_store.md) has one).",
    ),
    Option(
        "NUMBER_OF_RETRIES",
        int,
        0,
        "Retries when forwarding a due delayed message to its queue fails, before it is poison "
        "(NServiceBus' NumberOfRetries).",
        low=0,
        high=1000,
    ),
    Option(
        "TIME_TO_TRIGGER_STORE_CIRCUIT_BREAKER",
        timedelta,
        30 * SECOND,
        "How long `send(delay=)` and delayed retries may fail to be stored, in one process, before its breaker triggers "
        "(NServiceBus' TimeToTriggerStoreCircuitBreaker).",
        low=timedelta(milliseconds=1),
        high=timedelta(days=1),
        seconds=True,
    ),
    Option(
        "TIME_TO_TRIGGER_FETCH_CIRCUIT_BREAKER",
        timedelta,
        30 * SECOND,
        "How long fetching due delayed messages may fail before its breaker triggers "
        "(NServiceBus' TimeToTriggerFetchCircuitBreaker).",
        low=timedelta(milliseconds=1),
        high=timedelta(days=1),
        seconds=True,
    ),
    Option(
        "TIME_TO_TRIGGER_DISPATCH_CIRCUIT_BREAKER",
        timedelta,
        30 * SECOND,
        "How long forwarding due delayed messages may fail before its breaker triggers "
        "(NServiceBus' TimeToTriggerDispatchCircuitBreaker).",
        low=timedelta(milliseconds=1),
        high=timedelta(days=1),
        seconds=True,
    ),
    Option(
        "MAXIMUM_RECOVERY_FAILURES_PER_SECOND",
        int,
        1,
        "Failures to count a refused delayed message or to move it to poison, the database's included, per second over 30 s, "
        "above which the recovery breaker triggers (NServiceBus' MaximumRecoveryFailuresPerSecond).",
        low=1,
        high=1_000_000,
    ),
    Option(
        "TIME_TO_TRIGGER_RECEIVE_CIRCUIT_BREAKER",
        timedelta,
        30 * SECOND,
        "How long peeking at or receiving from a queue may fail before its breaker triggers.",
        low=timedelta(milliseconds=1),
        high=timedelta(days=1),
        seconds=True,
    ),
    Option(
        "PURGE_EXPIRED_ON_STARTUP",
        bool,
        True,
        "Delete expired messages in batches when a worker starts.",
    ),
    Option(
        "PURGE_INTERVAL",
        timedelta,
        timedelta(minutes=5),
        "Delete expired messages in batches this often; None: never.",
        low=SECOND,
        high=timedelta(days=1),
        optional=True,
        seconds=True,
    ),
    Option(
        "POISON_RETENTION",
        timedelta,
        timedelta(days=15),
        "How long archived and edited poison messages are kept before housekeeping deletes them; None: for ever. "
        "Unresolved ones are never deleted.",
        low=timedelta(hours=1),
        high=timedelta(days=3650),
        optional=True,
        seconds=True,
    ),
    Option("PURGE_BATCH", int, 3500, "Expired messages deleted in one statement.", low=1, high=3500),
)


class Settings:
    """The settings as attributes: ``conf.settings.PEEK_DELAY``. Read on first use, again after an override in tests."""

    def __getattr__(self, name: str) -> Any:
        # Called only for what is not in __dict__: once all are read, a setting is a plain attribute.
        if name not in _NAMES:
            raise AttributeError(f"QUEUEAPP has no setting {name!r}")
        self.__dict__.update(read_all(OPTIONS, getattr(django_settings, "QUEUEAPP", {}), "QUEUEAPP."))
        return self.__dict__[name]

    def reload(self) -> None:
        """Forget what was read; the next access reads Django's settings again."""
        self.__dict__.clear()


_NAMES = frozenset(option.name for option in OPTIONS)
settings = Settings()


def _reload(*, setting: str, **_: Any) -> None:
    if setting == "QUEUEAPP":
        settings.reload()


setting_changed.connect(_reload, dispatch_uid="queueapp.conf")
