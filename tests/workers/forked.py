"""Many worker processes at the price of one start: ``python -m tests.workers.forked <count> <queue>...``.

Each is what the supervisor would start, forked once Django is loaded. SIGTERM to the first process stops all of them.
"""

from __future__ import annotations

import os
import signal
import sys
import uuid

import django


def main(count: int, queues: list[str]) -> int:
    django.setup()
    from workers.processes.child import ChildOptions, ShutdownStages, run_worker

    children = []
    for _ in range(count):
        child = os.fork()
        if child == 0:
            stages = ShutdownStages()
            signal.signal(signal.SIGTERM, stages.advance)
            code = run_worker(ChildOptions("worker", queues, str(uuid.uuid4()), concurrency=2), stages)
            sys.stderr.flush()
            os._exit(code)
        children.append(child)

    def stop(*_: object) -> None:
        for child in children:
            os.kill(child, signal.SIGTERM)

    signal.signal(signal.SIGTERM, stop)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
