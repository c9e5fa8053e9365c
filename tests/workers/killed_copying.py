"""A worker that is killed around one of its statements: ``python -m tests.workers.killed_copying <queue>``.

It is started once and forked for each way to die, in which the worker on the queue begins, meets messages without a
recipient, and is gone: ``before`` the statement that replaces them, ``after`` it and before its commit, or
``committed``.
"""

from __future__ import annotations

import os
import signal
import sys

import django

WAYS = ("before", "after", "committed")


def main(label: str) -> int:
    django.setup()
    from queueapp import registry

    queue = registry.queues.find(label)
    for way in WAYS:
        child = os.fork()
        if child == 0:
            run_until_killed(queue, way)
            os._exit(1)
        _, status = os.waitpid(child, 0)
        if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
            return 1
    return 0


def run_until_killed(queue: object, way: str) -> None:
    from tests.in_process_worker import Worker
    from tests.testapp.models import Leased  # noqa: F401  (its app's consumers are none of this worker's)
    from workers.receiving.receivers import outcomes

    replace = outcomes._replace

    def die(*args: object) -> None:
        from django.db import connections, transaction

        state = args[0]
        if way == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        with transaction.atomic(using=state.alias):  # type: ignore[attr-defined]
            replace(*args)  # type: ignore[arg-type]
            if not queue.objects.exclude(recipient="").exists():  # type: ignore[attr-defined]
                return  # the one killed before is not gone from the server yet and holds the rows: once more
            assert connections[state.alias].in_atomic_block  # type: ignore[attr-defined]
            if way == "after":
                os.kill(os.getpid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    outcomes._replace = die  # type: ignore[assignment]
    worker = Worker(queue).start()
    worker._thread.join(60)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
