"""Worker processes that start at once: forks of a process that has loaded everything and holds nothing.

A fork runs the very function that a supervisor's child runs, and ends with its exit code; the signals are real. What is
saved is the start of an interpreter and the imports, most of a start. ``Forks`` is the benchmark's side of it; the
other is ``python -m tests.benchmarks.rig.forks QUEUE ...``, which forks for each line ``start`` on stdin and says the
process id, and for ``wait`` says the exit code of the last one.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import traceback
import uuid
from contextlib import suppress
from types import TracebackType
from typing import Any

START, WAIT = "start", "wait"


class Forks:
    """Worker processes of some queues, one at a time."""

    def __init__(self, *queues: Any, environment: dict[str, str]) -> None:
        self._command = [sys.executable, "-m", "tests.benchmarks.rig.forks", *(queue._meta.label for queue in queues)]
        self._environment = os.environ | environment
        self._process_id = 0

    def __enter__(self) -> Forks:
        self._forker = subprocess.Popen(
            self._command,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            process_group=0,
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        # A worker that still runs sees the end of the pipe that the forker held, and follows.
        self._forker.kill()
        self._forker.communicate()

    def start(self) -> None:
        """Start a worker process."""
        self._process_id = self._ask(START)

    def stop(self, patience: float) -> int:
        """SIGTERM for the worker process: its exit code; -SIGKILL when it took longer than that."""
        os.kill(self._process_id, signal.SIGTERM)
        return self._ask(WAIT, patience)

    def _ask(self, what: str, patience: float | None = None) -> int:
        assert self._forker.stdin is not None
        assert self._forker.stdout is not None
        self._forker.stdin.write(f"{what}\n")
        if patience is not None and not select.select([self._forker.stdout], [], [], patience)[0]:
            with suppress(ProcessLookupError):
                os.kill(self._process_id, signal.SIGKILL)
        answer = self._forker.stdout.readline()
        if not answer:
            raise RuntimeError("the forking process died")
        return int(answer)


def main(labels: list[str]) -> None:
    """Fork on request, until stdin ends."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.benchmarks.settings")
    import django

    django.setup()
    from workers.processes import child

    life_read, life_write = os.pipe()
    process_id = 0
    for line in sys.stdin:
        if line.strip() == WAIT:
            print(os.waitstatus_to_exitcode(os.waitpid(process_id, 0)[1]), flush=True)
            continue
        process_id = os.fork()
        if process_id == 0:
            code = 1
            try:
                os.close(life_write)
                options = child.ChildOptions("worker", labels, str(uuid.uuid4()), parent_fd=life_read)
                code = child.main(options.to_json())
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        print(process_id, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
