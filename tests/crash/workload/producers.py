"""Producers of the seeded run: `python -m tests.crash.workload.producers KIND SEED`, until SIGTERM.

    single    one message per transaction, beside its business row (the ledger's); some are rolled back on purpose
    bulk      a few hundred by the bulk path, with their rows, in one transaction
    delayed   messages that are due in a while
    celery    tasks of Celery, in a transaction with their rows
    rude      messages whose handlers leave behind what no handler should (``rudeness``): those that `CRASH_RUDE` names,
              with
              innocent ones beside them that would feel it

A producer that loses its connection does not know whether its last transaction was committed. It does not have to: row
and message were one transaction, so they are both there or both not. It goes on with the next one.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import msgspec

BACKLOG = 3000


def main(kind: str, seed: int) -> None:
    """Produce until a stop request."""
    import django

    django.setup()
    from django.db import Error, connection

    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    produce, pause = KINDS[kind]
    chance = random.Random(f"{seed} {kind} {os.getpid()}")
    count = 0
    while not stopping.wait(pause):
        try:
            if count % 50 == 0 and backlog(connection) > BACKLOG:
                stopping.wait(0.5)
                continue
            stopping.wait(produce(chance, f"{kind}-{os.getpid()}-{count}") or 0)
        except Error:
            connection.close()
            stopping.wait(0.2)
        count += 1
    connection.close()


class _OnPurpose(Exception):
    """Rolls a transaction back."""


def single(chance: random.Random, key: str) -> None:
    """One message beside its business row."""
    from django.db import transaction

    from . import ledger

    queue = pick(chance)
    try:
        with transaction.atomic():
            ledger.sent("default", key, queue._meta.label, "single")
            queue.send(message(chance, key))
            if chance.random() < 0.02:
                raise _OnPurpose
    except _OnPurpose:
        pass


def bulk(chance: random.Random, key: str) -> None:
    """A few hundred by the bulk path."""
    from django.db import transaction

    from . import ledger

    queue = pick(chance)
    keys = [f"{key}-{number}" for number in range(chance.randint(20, 300))]
    with transaction.atomic():
        ledger.sent_many("default", keys, queue._meta.label, "bulk")
        queue.send_many(message(chance, key) for key in keys)


def delayed(chance: random.Random, key: str) -> None:
    """One that is due within three seconds."""
    from django.db import transaction

    from . import ledger

    queue = pick(chance)
    with transaction.atomic():
        ledger.sent("default", key, queue._meta.label, "delayed")
        queue.send(message(chance, key), delay=timedelta(seconds=3 * chance.random()))


def rude(chance: random.Random, key: str) -> float:
    """One rude message, and the innocent ones beside it; returns how many seconds it keeps a handler busy."""
    from django.db import transaction

    from queueapp.messages import new_id
    from tests.testapp.models import Leased

    from . import ledger, messages, rudeness

    item = rudeness.RUDENESSES[chance.choice(os.environ["CRASH_RUDE"].split(","))]
    # Only a leased message has something to extend.
    queue = Leased if item.act is rudeness.extend_in_atomic else pick(chance)
    kind = messages.HastyRude if item.hasty else messages.Rude
    with transaction.atomic():
        ledger.sent("default", key, queue._meta.label, f"rude: {item.name}")
        if item.foreign or item.headers:
            body = msgspec.json.encode(kind(key, item.name))
            name = f"{kind.__module__}.{kind.__qualname__}"
            rudeness.insert_foreign("default", queue._meta.db_table, new_id(), item, name, body)
        else:
            queue.send(kind(key, item.name))
        for number in range(item.count_beside):
            beside = f"{key}-beside-{number}"
            ledger.sent("default", beside, queue._meta.label, "beside")
            queue.send(messages.Act(beside, **item.beside))
    return item.rest_seconds


def celery(chance: random.Random, key: str) -> None:
    """One task of Celery, beside its business row; some are due later, fail, are retried, or are rolled back."""
    from django.db import transaction

    from . import celeryapp, ledger

    task, label = chance.choices(
        ((celeryapp.late, ledger.LATE), (celeryapp.late_kept, ledger.LATE), (celeryapp.early, ledger.EARLY)), (3, 1, 3)
    )[0]
    draw = chance.random()
    reported: dict[str, Any] = {}
    if draw < 0.15:
        reported = {"sleep_ms": chance.randint(5, 300)}
    elif draw < 0.17:
        reported = {"fail": True}
    elif draw < 0.2:
        reported = {"retry": True}
    later = {"countdown": 3 * chance.random()} if chance.random() < 0.1 else {}
    try:
        with transaction.atomic():
            ledger.sent("default", key, label, "celery")
            task.apply_async([key], reported, **later)
            if chance.random() < 0.02:
                raise _OnPurpose
    except _OnPurpose:
        pass


#: What each kind does, and its pause between two of them in seconds; what it returns is a longer one.
KINDS: dict[str, tuple[Callable[[random.Random, str], float | None], float]] = {
    "single": (single, 0.02),
    "bulk": (bulk, 2.0),
    "delayed": (delayed, 0.08),
    "rude": (rude, 0.2),
    "celery": (celery, 0.03),
}


def pick(chance: random.Random) -> Any:
    """A queue: the two that promise most are the busiest."""
    from tests.testapp.models import AtMostOnce, Leased, Transactional

    return chance.choices((Leased, Transactional, AtMostOnce), (4, 4, 2))[0]


def message(chance: random.Random, key: str) -> Any:
    """Mostly good and quick; some slow, some that fail once or twice, some that send another message."""
    from .messages import Act

    draw = chance.random()
    if draw < 0.90:
        return Act(key)
    if draw < 0.95:
        return Act(key, sleep_ms=chance.randint(5, 150))
    if draw < 0.96:
        return Act(key, query_ms=chance.randint(5, 300))
    if draw < 0.98:
        return Act(key, fail=chance.choice((1, 1, 2)))
    return Act(key, send_key=f"{key}-chained", send_to="testapp.Transactional")


def backlog(connection: Any) -> int:
    """How much is waiting, counted no further than needed."""
    from . import ledger

    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT " + " + ".join(
                f"(SELECT count(*) FROM ({ledger.some_of(connection.vendor, table, BACKLOG)}) x)"
                for table in ledger.QUEUES.values()
            )
        )  # fmt: skip
        return int(cursor.fetchone()[0])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
