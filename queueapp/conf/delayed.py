"""Settings of the delayed store and its dispatcher."""

from __future__ import annotations

from datetime import timedelta

from ..options import Option

OPTIONS: tuple[Option, ...] = (
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
