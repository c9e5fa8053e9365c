"""A process that carries an operation out and is killed around a batch: ``python -m
tests.queueapp.operations.killed_operation``.

It is started once and forked for each way to die: in the middle of the second batch, ``before`` its messages are moved
or ``after`` it, and when the batch is ``committed``.
"""

from __future__ import annotations

import os
import signal
import sys
from time import monotonic
from typing import Any

import django

WAYS = ("before", "after", "committed")


def main() -> int:
    django.setup()
    for way in WAYS:
        child = os.fork()
        if child == 0:
            run_until_killed(way)
            os._exit(1)
        _, status = os.waitpid(child, 0)
        if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
            return 1
    return 0


def run_until_killed(way: str) -> None:
    from queueapp.operations import bulk_operations

    key, batches = ("poison", "requeue"), 0
    really = bulk_operations.ACTIONS[key]

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def run(*args: Any) -> Any:
        nonlocal batches
        batches += 1
        if batches == 2 and way == "before":
            die()
        result = really(*args)
        if batches == 2 and way == "after":
            die()
        return result

    def may_continue() -> bool:
        if batches == 2:
            die()
        return True

    bulk_operations.BATCH = 10
    bulk_operations.ACTIONS[key] = run
    # The server may not have noticed yet that the process before is gone, which has the operation's row.
    end = monotonic() + 60
    while monotonic() < end:
        bulk_operations.carry_out("default", may_continue, seconds=60)


if __name__ == "__main__":
    sys.exit(main())
