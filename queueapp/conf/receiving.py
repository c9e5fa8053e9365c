"""Settings: how a queue is looked at and its messages are claimed."""

from __future__ import annotations

from datetime import timedelta

from ..options import Option

#: Receive tasks of a queue in one worker process.
MAX_CONCURRENCY = 256

OPTIONS: tuple[Option, ...] = (
    Option(
        "PEEK_DELAY",
        timedelta,
        timedelta(seconds=1),
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
        "NOTIFY",
        bool,
        True,
        "Tell sleeping workers of a commit that sent messages, and listen for it: NOTIFY on PostgreSQL, Service Broker on SQL "
        "Server.",
    ),
    Option(
        "NOTIFY_INTERVAL",
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
        "CLAIM_PAUSE",
        timedelta,
        timedelta(0),
        "A receive task that got all that it asked for waits so long before it takes more (AsyncMonolith's ProcessorMinDelay); 0: "
        "claim follows claim.",
        low=timedelta(0),
        high=timedelta(hours=1),
        seconds=True,
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
        "TIME_TO_TRIGGER_RECEIVE_CIRCUIT_BREAKER",
        timedelta,
        timedelta(seconds=30),
        "How long peeking at or receiving from a queue may fail before its breaker triggers.",
        low=timedelta(milliseconds=1),
        high=timedelta(days=1),
        seconds=True,
    ),
)
