"""The declarations of the project-wide settings, in the groups and the order of the page docs/settings.md."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from ..options import Option

#: Most receivers of a queue in one worker process.
MAX_CONCURRENCY = 256

_RECEIVING: tuple[Option, ...] = (
    Option(
        "PEEK_DELAY",
        timedelta,
        timedelta(seconds=1),
        "Wait after an empty peek (NServiceBus' QueuePeeker.Delay). More than 10 s gives a warning.",
        low=timedelta(milliseconds=100),
        high=timedelta(hours=1),
        seconds=True,
    ),
    Option(
        "MAX_RECORDS_TO_PEEK",
        int,
        1000,
        "Most waiting messages that a peek counts (NServiceBus' MaxRecordsToPeek).",
        low=1,
        high=1_000_000,
    ),
    Option("CONCURRENCY", int, 4, "Receivers (threads) per queue and worker process.", low=1, high=MAX_CONCURRENCY),
    Option(
        "NOTIFY",
        bool,
        True,
        "Notify idle workers after a commit that sent messages, and listen for notifications: NOTIFY on PostgreSQL, "
        "Service Broker on SQL Server.",
    ),
    Option(
        "NOTIFY_INTERVAL",
        timedelta,
        timedelta(milliseconds=50),
        "A process that sends to a queue every 2 ms or more often notifies workers once per interval; one that sends "
        "less often notifies them each time.",
        low=timedelta(milliseconds=1),
        high=timedelta(seconds=10),
        seconds=True,
    ),
    Option(
        "PREPARED_STATEMENTS",
        bool,
        True,
        "Prepare the engine's statements and, on workers' connections, statements that handlers repeat "
        "(`prepare_threshold` 5 unless `OPTIONS` sets it; useful with `server_side_binding`). Names are made from the "
        "statement, so that a pooler cannot run another one in its place. Behind a pooler that does not support them, "
        "nothing is prepared; False saves the test for it and its log line.",
    ),
    Option(
        "MAX_BATCH",
        int,
        500,
        "Most messages that one receiver leases at once (on SQL Server batches stay below lock escalation).",
        low=1,
        high=3500,
    ),
    Option(
        "AT_MOST_ONCE_BATCH",
        int,
        500,
        "The same for an AT_MOST_ONCE queue. A batch is deleted when it is received: a process that dies loses at most "
        "this many messages per receiver, and no more than it handles in BATCH_TARGET.",
        low=1,
        high=3500,
    ),
    Option(
        "CLAIM_PAUSE",
        timedelta,
        timedelta(0),
        "Wait of a receiver after a full batch, before the next claim (AsyncMonolith's ProcessorMinDelay); 0: none.",
        low=timedelta(0),
        high=timedelta(hours=1),
        seconds=True,
    ),
    Option(
        "MAX_BATCH_BYTES",
        int,
        16 * 1024 * 1024,
        "Approximate limit of the bytes of bodies in one claim, which is sized by the average body of earlier claims; "
        "one message is claimed however large it is.",
        low=64 * 1024,
        high=2**30,
    ),
    Option(
        "BATCH_TARGET",
        timedelta,
        timedelta(milliseconds=80),
        "Target for the time in which a batch is handled; batches are sized by it.",
        low=timedelta(milliseconds=1),
        high=timedelta(seconds=30),
        seconds=True,
    ),
    Option(
        "TIME_TO_TRIGGER_RECEIVE_CIRCUIT_BREAKER",
        timedelta,
        timedelta(seconds=30),
        "How long peeking at or receiving from a queue may fail before its circuit breaker opens.",
        low=timedelta(milliseconds=1),
        high=timedelta(days=1),
        seconds=True,
    ),
)


_HANDLERS: tuple[Option, ...] = (
    Option(
        "EAGER",
        str,
        "",
        "Handle messages in the thread that sends them, without a worker: after its transaction has committed "
        "(at_commit), or at once within it (at_once). For development and tests "
        "([testing](howto/testing.md#eager-mode)); empty: workers handle them.",
        accept=("", "at_commit", "at_once").__contains__,
        words="empty, 'at_commit' or 'at_once'",
    ),
    Option(
        "CORRELATE",
        bool,
        True,
        "Messages that a handler sends get the headers `correlation-id` and `related-to` of the message it handles "
        "([context](reference/context.md#what-a-handler-sends)).",
    ),
    Option(
        "HANDLER_CONTEXT_MANAGER",
        str,
        "",
        "Dotted path of a function of the context that returns a context manager, in which each handler is called, for "
        "example to select the tenant that a header names ([context](reference/context.md#around-every-handler)). "
        "Empty: none.",
    ),
    Option(
        "CANCEL_GRACE",
        timedelta,
        timedelta(seconds=5),
        "A sync handler that was asked to stop (`cancel_running`) is interrupted after this time; until then it can "
        "read `context.cancelled`.",
        low=timedelta(0),
        high=timedelta(hours=1),
        seconds=True,
    ),
)


_RETRIES: tuple[Option, ...] = (
    Option(
        "ATTEMPTS", int, 5, "Attempts of a message before it is poison (AsyncMonolith's MaxAttempts).", low=1, high=1000
    ),
    Option(
        "RETRY_DELAY",
        timedelta,
        timedelta(seconds=10),
        "Wait between two attempts (AsyncMonolith's AttemptDelay); 0: retry at once, in place.",
        low=timedelta(0),
        high=timedelta(days=30),
        seconds=True,
    ),
    Option(
        "RETRY_DELAY_INCREASE",
        timedelta,
        timedelta(0),
        "Added to the wait at each further attempt.",
        low=timedelta(0),
        high=timedelta(days=30),
        seconds=True,
    ),
    Option(
        "RETRY_BACKOFF",
        float,
        1.0,
        "Factor by which the wait is longer at each further attempt; 2: exponential back-off; 1: off.",
        low=1.0,
        high=100.0,
    ),
    Option(
        "RETRY_BACKOFF_MAX",
        timedelta,
        timedelta(hours=1),
        "Longest wait that RETRY_BACKOFF leads to, jitter included. A longer RETRY_DELAY counts as it is.",
        low=timedelta(0),
        high=timedelta(days=30),
        seconds=True,
    ),
    Option(
        "RETRY_JITTER",
        float,
        0.0,
        "Share of the wait that is added at random, so that messages that failed together are not retried together.",
        low=0.0,
        high=1.0,
    ),
    Option("IMMEDIATE_RETRIES", int, 0, "Attempts that are repeated at once, before the first wait.", low=0, high=1000),
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
        "THROTTLE_AFTER",
        int,
        0,
        "After this many consecutive failures of a queue's handlers, one receiver with THROTTLE_WAIT between attempts "
        "remains, until an attempt succeeds (for an outage of something that all handlers need); 0: off.",
        low=0,
        high=1_000_000,
    ),
    Option(
        "THROTTLE_WAIT",
        timedelta,
        timedelta(seconds=1),
        "Wait between attempts while throttled.",
        low=timedelta(milliseconds=1),
        high=timedelta(hours=1),
        seconds=True,
    ),
)


_PROCESSES: tuple[Option, ...] = (
    Option(
        "HEARTBEAT_INTERVAL",
        timedelta,
        timedelta(seconds=5),
        "Interval of the heartbeats of a worker process.",
        low=timedelta(milliseconds=100),
        high=timedelta(minutes=10),
        seconds=True,
    ),
    Option(
        "DEAD_AFTER",
        timedelta,
        timedelta(seconds=20),
        "A subscriber without a heartbeat for this long is dead; its leases are released.",
        low=timedelta(milliseconds=500),
        high=timedelta(hours=1),
        seconds=True,
    ),
    Option(
        "CRASH_TRACKING_PERIOD",
        timedelta,
        timedelta(seconds=60),
        "How long crash tracking lasts after a subscriber of a TRANSACTIONAL queue stopped without deregistering: each "
        "delivery is recorded before its handler runs, at the cost of one commit per 25 messages. Without it a "
        "rollback leaves no trace of a message that kills its whole process tree. Leased messages record their "
        "deliveries anyway.",
        low=timedelta(seconds=1),
        high=timedelta(hours=24),
        seconds=True,
    ),
    Option(
        "STUCK_HANDLER_AFTER",
        timedelta,
        timedelta(seconds=10),
        "A handler that runs this much longer than its time limit is stuck: its process is drained and replaced.",
        low=timedelta(milliseconds=100),
        high=timedelta(hours=1),
        seconds=True,
    ),
    Option(
        "DATABASE_TIMEOUT",
        timedelta,
        timedelta(seconds=30),
        "A worker closes a connection when one of its own statements (peek, claim, ack, heartbeat, ...) is not "
        "answered within this time, and keepalives detect a dead server or worker in about this time. Statements of "
        "handlers have the handler's time limit instead. None: the limits of the operating system, which may be hours.",
        low=timedelta(seconds=1),
        high=timedelta(hours=1),
        optional=True,
        seconds=True,
    ),
    Option(
        "SHUTDOWN_GRACE",
        timedelta,
        timedelta(seconds=15),
        "How long a stopping worker waits for running handlers before it cancels them.",
        low=timedelta(0),
        high=timedelta(hours=1),
        seconds=True,
    ),
)


_DELAYED: tuple[Option, ...] = (
    Option(
        "DELAYED_STORE",
        str,
        "queueapp.delayed.SqlDelayedStore",
        "Dotted path of the delayed store: a subclass of queueapp.delayed.DelayedStore, after NServiceBus' "
        "IDelayedMessageStore ([delayed_store.md](delayed_store.md) has one).",
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
        "DISPATCH_INTERVAL",
        timedelta,
        timedelta(seconds=5),
        "Longest wait of the delayed dispatcher between two looks for due messages.",
        low=timedelta(milliseconds=50),
        high=timedelta(minutes=1),
        seconds=True,
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
        timedelta(seconds=30),
        "How long `send(delay=)` and delayed retries may fail in one process before the store's circuit breaker opens "
        "(NServiceBus' TimeToTriggerStoreCircuitBreaker).",
        low=timedelta(milliseconds=1),
        high=timedelta(days=1),
        seconds=True,
    ),
    Option(
        "TIME_TO_TRIGGER_FETCH_CIRCUIT_BREAKER",
        timedelta,
        timedelta(seconds=30),
        "How long fetching due delayed messages may fail before its circuit breaker opens "
        "(NServiceBus' TimeToTriggerFetchCircuitBreaker).",
        low=timedelta(milliseconds=1),
        high=timedelta(days=1),
        seconds=True,
    ),
    Option(
        "TIME_TO_TRIGGER_DISPATCH_CIRCUIT_BREAKER",
        timedelta,
        timedelta(seconds=30),
        "How long forwarding due delayed messages may fail before its circuit breaker opens "
        "(NServiceBus' TimeToTriggerDispatchCircuitBreaker).",
        low=timedelta(milliseconds=1),
        high=timedelta(days=1),
        seconds=True,
    ),
    Option(
        "MAXIMUM_RECOVERY_FAILURES_PER_SECOND",
        int,
        1,
        "Failures per second, over 30 s, to count a refused delayed message or to move it to poison, above which the "
        "recovery circuit breaker opens (NServiceBus' MaximumRecoveryFailuresPerSecond).",
        low=1,
        high=1_000_000,
    ),
)


#: Lowest retention of the journal: a reader that is away for a moment must not lose its position.
SHORTEST_RETENTION = timedelta(minutes=1)


def _is_journal(value: dict[Any, Any]) -> bool:
    return all(_is_topic(topic) and _is_retention(kept) for topic, kept in value.items())


def _is_topic(text: Any) -> bool:
    if not isinstance(text, str) or not text or "\0" in text or len(text) > 255:
        return False
    try:
        re.compile(text)
    except (re.error, OverflowError):
        return False
    return True


def _is_retention(kept: Any) -> bool:
    return kept is None or (isinstance(kept, timedelta) and SHORTEST_RETENTION <= kept <= timedelta(days=36500))


_RETENTION: tuple[Option, ...] = (
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
        "Interval at which expired messages are deleted in batches; None: never.",
        low=timedelta(seconds=1),
        high=timedelta(days=1),
        optional=True,
        seconds=True,
    ),
    Option("PURGE_BATCH", int, 3500, "Expired messages deleted in one statement.", low=1, high=3500),
    Option(
        "POISON_RETENTION",
        timedelta,
        timedelta(days=15),
        "How long archived and edited poison messages are kept before maintenance deletes them; None: for ever. "
        "Unresolved ones are never deleted.",
        low=timedelta(hours=1),
        high=timedelta(days=3650),
        optional=True,
        seconds=True,
    ),
    Option(
        "GROUP_RETENTION",
        timedelta,
        timedelta(days=7),
        "How long complete message groups are kept before maintenance deletes them; None: for ever.",
        low=timedelta(minutes=1),
        high=timedelta(days=3650),
        optional=True,
        seconds=True,
    ),
    Option(
        "PROCESSED_RETENTION",
        timedelta,
        timedelta(days=7),
        "How long `processed_once` remembers a processed message; None: for ever.",
        low=timedelta(minutes=1),
        high=timedelta(days=3650),
        optional=True,
        seconds=True,
    ),
    Option(
        "STATISTICS_RETENTION",
        timedelta,
        timedelta(days=30),
        "How long the hourly figures of the queues are kept for charts; None: for ever. Those of five minutes are kept "
        "for two days, those of a minute for two hours.",
        low=timedelta(days=1),
        high=timedelta(days=3650),
        optional=True,
        seconds=True,
    ),
    Option(
        "JOURNAL",
        dict,
        {},
        "Journaled topics with their retention; None: for ever. A key is a name, or a regular expression that is "
        "searched in the topic; the first match counts ([journal](reference/journal.md)).",
        accept=_is_journal,
        words="a dict of topics or regular expressions with a timedelta from 0:01:00 to 36500 days, or None, for each",
    ),
)


_BODIES: tuple[Option, ...] = (
    Option(
        "MAX_DECOMPRESSED",
        int,
        64 * 1024 * 1024,
        "Largest size in bytes of a body after decompression. A larger one is poison, and is never decompressed whole.",
        low=64 * 1024,
        high=2**31 - 1,
    ),
    Option(
        "KEYRING",
        object,
        "queueapp.encryption.from_environment",
        "Callable, or its dotted path, that returns the keys of encrypted bodies by id: the first key encrypts, all "
        "keys decrypt ([encoding](reference/encoding.md#keys)).",
        accept=lambda value: isinstance(value, str) or callable(value),
        words="a callable or the dotted path of one",
    ),
)


def _is_alerts(value: dict[Any, Any]) -> bool:
    return all(name in _ALERTS and _ALERTS[name](given) for name, given in value.items())


def _all_values(accepts: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """One value for all queues, or a dict of values by queue."""
    return lambda given: (
        all(isinstance(name, str) and accepts(item) for name, item in given.items())
        if isinstance(given, dict)
        else accepts(given)
    )


_ALERTS: dict[str, Callable[[Any], bool]] = {
    "mail": lambda given: (
        isinstance(given, list | tuple) and all(isinstance(address, str) and "@" in address for address in given)
    ),
    "webhook": lambda given: isinstance(given, str) and given.startswith(("https://", "http://")),
    "max_age": _all_values(lambda given: isinstance(given, timedelta) and given > timedelta(0)),
    "max_waiting": _all_values(lambda given: type(given) is int and given >= 0),
    "poison": lambda given: isinstance(given, bool),
    "dead_worker": lambda given: isinstance(given, bool),
    "canary": lambda given: isinstance(given, bool),
    "ledger": lambda given: isinstance(given, bool),
    "every": lambda given: isinstance(given, timedelta) and timedelta(seconds=1) <= given <= timedelta(hours=1),
}


_OBSERVABILITY: tuple[Option, ...] = (
    Option(
        "ALERTS",
        dict,
        {},
        "Conditions that raise alerts, and the channels that are notified ([alerts](howto/alerts.md)); empty: none.",
        accept=_is_alerts,
        words="a dict with any of mail (a list of addresses), webhook (an http or https URL), max_age (a timedelta), "
        "max_waiting (a whole number from 0; either also a dict of queues, '*' for the others), poison, canary, ledger "
        "and dead_worker (True or False), every (a timedelta from 0:00:01 to 1:00:00)",
    ),
    Option(
        "METRICS_TOKEN",
        str,
        "",
        "Bearer token required to read [the metrics](monitoring.md#prometheus) without a login; empty: a login is "
        "required.",
    ),
    Option(
        "OPENTELEMETRY",
        bool,
        False,
        "Trace messages and measure them with OpenTelemetry ([tracing](howto/tracing.md)); needs "
        "`queueapp[opentelemetry]`.",
    ),
)


#: Heading -> the settings of a group.
GROUPS: dict[str, tuple[Option, ...]] = {
    "Receiving": _RECEIVING,
    "Handlers": _HANDLERS,
    "Retries and failures": _RETRIES,
    "Worker processes": _PROCESSES,
    "Delayed messages": _DELAYED,
    "Retention and maintenance": _RETENTION,
    "Bodies": _BODIES,
    "Monitoring": _OBSERVABILITY,
}
