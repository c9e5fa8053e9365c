"""Settings of what is done after a failed attempt, where neither consumer nor queue sets it."""

from __future__ import annotations

from datetime import timedelta

from ..options import Option

OPTIONS: tuple[Option, ...] = (
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
