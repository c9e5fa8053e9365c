"""A Redis of a test's own, for what moves between it and our queues.

`python -m tests.redis` installs Debian's where there is none and it is allowed to. It always succeeds: without one,
those tests are skipped by name.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from project.system_packages import install_first_available


def find_redis() -> str | None:
    """The path of Redis' server, or None."""
    return shutil.which("redis-server") or shutil.which("valkey-server")


@contextlib.contextmanager
def running_redis(folder: Path) -> Iterator[str]:
    """A server that writes nothing to disk; its URL."""
    program = find_redis()
    assert program is not None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        program,
        "--port",
        str(port),
        "--bind",
        "127.0.0.1",
        "--save",
        "",
        "--appendonly",
        "no",
        "--dir",
        str(folder),
    ]
    with (folder / "redis.log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, process_group=0)
    try:
        _wait_for(port, server)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        server.kill()
        server.wait()


def _wait_for(port: int, server: subprocess.Popen[bytes]) -> None:
    from tests.in_process_worker import eventually

    def answers() -> bool:
        assert server.poll() is None, "redis-server has ended"
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return True
        return False

    eventually(answers)


def main() -> int:
    if find_redis() is not None:
        return 0
    print("The tests of moving a broker need Redis, and there is none; trying to install it ...", flush=True)
    if install_first_available(["redis-server", "valkey-server"]) is None or find_redis() is None:
        print(
            "It could not be installed (sudo apt-get install redis-server); those tests are skipped.", file=sys.stderr
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
