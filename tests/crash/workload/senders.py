"""A sender behind a pooler: `python -m tests.crash.workload.senders QUEUE COUNT MEETING OTHER ...`, exit code 1 after
any error.

Its first message is sent in a transaction that stays open until all of the OTHER senders have one open too, each
leaving a file of its queue's name in the directory MEETING: so each of them has met a server session of its own. After
that it sends in every way that a statement can reach the server: outside and inside of a transaction, as the first of
one and later, with options, after a rollback.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from ..rig.waiting import wait_until


def main(label: str, count: int, meeting: Path, rest: list[str]) -> int:
    """Send; returns how many sends failed."""
    import django

    django.setup()
    from django.db import Error, transaction

    from queueapp import registry

    from . import ledger
    from .messages import Act

    queue = registry.queues.find(label)

    def send(key: str, **options: Any) -> None:
        queue.send(Act(key), **options)
        ledger.sent("default", key, label, "single")

    def alone(key: str) -> None:
        send(key)

    def in_a_transaction(key: str) -> None:
        with transaction.atomic():
            ledger.sent("default", f"{key} a", label, "single")
            queue.send(Act(f"{key} a"))
            send(f"{key} b")

    def first_in_a_transaction(key: str) -> None:
        with transaction.atomic():
            send(key)

    def with_options(key: str) -> None:
        with transaction.atomic():
            send(f"{key} a", expires_in=timedelta(hours=1), correlation_id="c")
            send(f"{key} b", delay=timedelta(milliseconds=50))

    def many(key: str) -> None:
        with transaction.atomic():
            queue.send_many((Act(key), Act(f"{key} b")))
            ledger.sent("default", key, label, "bulk")
            ledger.sent("default", f"{key} b", label, "bulk")

    def rolled_back(key: str) -> None:
        with transaction.atomic():
            send(key)
            with transaction.atomic():
                send(f"{key} never")
                transaction.set_rollback(True)
        with transaction.atomic():
            send(f"{key} never")
            transaction.set_rollback(True)

    ways: list[Callable[[str], None]] = [
        alone, in_a_transaction, first_in_a_transaction, with_options, many, rolled_back,
    ]  # fmt: skip
    with transaction.atomic():
        send(f"{label} first")
        (meeting / label).touch()
        wait_until(lambda: all((meeting / second).exists() for second in rest), "the other senders are there")
    failed = 0
    for number in range(count):
        try:
            ways[number % len(ways)](f"{label} {number}")
        except Error:
            traceback.print_exc()
            failed += 1
    return failed


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:]) else 0)
