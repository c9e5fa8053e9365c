"""Settings of how queues are polled and messages are claimed."""

from __future__ import annotations

from datetime import timedelta

from ..options import Option

#: Most receivers of a queue in one worker process.
MAX_CONCURRENCY = 256

OPTIONS: tuple[Option, ...] = (
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
        "Service "
        "Broker on SQL Server.",
    ),
    Option(
        "NOTIFY_INTERVAL",
        timedelta,
        timedelta(milliseconds=50),
        "A process that sends to a queue every 2 ms or more often notifies workers once per interval; one that sends "
        "less "
        "often notifies them each time.",
        low=timedelta(milliseconds=1),
        high=timedelta(seconds=10),
        seconds=True,
    ),
    Option(
        "PREPARED_STATEMENTS",
        bool,
        True,
        "Prepare the engine's statements and, on workers' connections, statements that handlers repeat "
        "(`prepare_threshold` 5 "
        "unless `OPTIONS` sets it; useful with `server_side_binding`). Names are made from the statement, so that a "
        "pooler "
        "cannot run another one in its place. Behind a pooler that does not support them, nothing is prepared; False "
        "saves "
        "the test for it and its log line.",
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
        "this "
        "many messages per receiver, and no more than it handles in BATCH_TARGET.",
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
        "one "
        "message is claimed however large it is.",
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
