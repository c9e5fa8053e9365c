"""Settings: how long what a worker process does may take until somebody acts."""

from __future__ import annotations

from datetime import timedelta

from ..options import Option

OPTIONS: tuple[Option, ...] = (
    Option(
        "HEARTBEAT_INTERVAL",
        timedelta,
        timedelta(seconds=5),
        "How often a worker process says that it is alive.",
        low=timedelta(milliseconds=100),
        high=timedelta(minutes=10),
        seconds=True,
    ),
    Option(
        "DEAD_AFTER",
        timedelta,
        timedelta(seconds=20),
        "A subscriber without a heartbeat for this long is dead: its leases are released.",
        low=timedelta(milliseconds=500),
        high=timedelta(hours=1),
        seconds=True,
    ),
    Option(
        "CRASH_TRACKING_PERIOD",
        timedelta,
        timedelta(seconds=60),
        "For so long after a subscriber of a TRANSACTIONAL queue died without a goodbye each hand-out of that queue is recorded "
        "before its handler runs, for one commit more per 25 messages: a rollback leaves no trace of a message that kills its "
        "whole process tree. Leased messages carry their hand-outs themselves.",
        low=timedelta(seconds=1),
        high=timedelta(hours=24),
        seconds=True,
    ),
    Option(
        "STUCK_HANDLER_AFTER",
        timedelta,
        timedelta(seconds=10),
        "A handler that ignores its time limit for so much longer costs its process: it is drained and replaced.",
        low=timedelta(milliseconds=100),
        high=timedelta(hours=1),
        seconds=True,
    ),
    Option(
        "DATABASE_TIMEOUT",
        timedelta,
        timedelta(seconds=30),
        "A worker gives a connection up when a statement of its own (peek, claim, ack, heartbeat, ...) is not answered for so "
        "long, and keepalives find a dead server or worker in about this time. Statements of handlers have the handler's "
        "time limit instead. None: as the operating system does, which may take hours.",
        low=timedelta(seconds=1),
        high=timedelta(hours=1),
        optional=True,
        seconds=True,
    ),
    Option(
        "SHUTDOWN_GRACE",
        timedelta,
        timedelta(seconds=15),
        "How long a stopping worker lets running handlers finish before it cancels them.",
        low=timedelta(0),
        high=timedelta(hours=1),
        seconds=True,
    ),
)
