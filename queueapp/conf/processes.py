"""Time limits of worker processes."""

from __future__ import annotations

from datetime import timedelta

from ..options import Option

OPTIONS: tuple[Option, ...] = (
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
        "delivery "
        "is recorded before its handler runs, at the cost of one commit per 25 messages. Without it a rollback leaves "
        "no trace "
        "of a message that kills its whole process tree. Leased messages record their deliveries anyway.",
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
        "answered within "
        "this time, and keepalives detect a dead server or worker in about this time. Statements of handlers have the "
        "handler's time limit instead. None: the limits of the operating system, which may be hours.",
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
