"""Settings: what becomes of a message whose handler failed, where neither consumer nor queue says it."""

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
        timedelta(seconds=1),
        "Wait between attempts while throttled.",
        low=timedelta(milliseconds=1),
        high=timedelta(hours=1),
        seconds=True,
    ),
)
