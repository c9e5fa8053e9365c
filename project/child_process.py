"""Management commands as child processes: stopped in order by their parent, and never outliving it.

A child is its own process group, so that Ctrl-C in the terminal reaches the parent alone, which stops its children one
after the other. Should the parent be killed, the kernel closes its end of a pipe, and the child stops; that
part is the ``main`` of this module, which a child runs through.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

from project.paths import CHECKOUT

#: What a child that did not stop gets before it is killed, after it has been asked a second time.
_HURRY_SECONDS = 5.0


class ChildProcess:
    """One management command in a process of its own. ``log``: the file for its output; None: the parent's.
    ``environment``: variables that it gets beside the parent's."""

    def __init__(self, *command: str, log: Path | None = None, environment: Mapping[str, str] | None = None) -> None:
        self.command = command
        self.log = log
        self.environment = environment or {}
        self._process: subprocess.Popen[bytes] | None = None
        self._life = -1

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start it, again if it ended; its output is appended to the log."""
        self._close_life()
        read_end, self._life = os.pipe()
        output = self.log.open("ab") if self.log else None
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "project.child_process", str(read_end), *self.command],
                cwd=CHECKOUT,
                env=os.environ | dict(self.environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[read_end],
                process_group=0,
            )
        finally:
            os.close(read_end)
            if output:
                output.close()

    def exit_code(self, timeout: float = 0.0) -> int | None:
        """Its exit code, negative for a signal; None while it runs, after waiting ``timeout`` seconds for it."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout)
        return None

    def ask_to_stop(self) -> None:
        """Send SIGTERM, if it still runs. A second one makes a worker hurry."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def stop(self, seconds: float) -> None:
        """Ask it to stop, wait so long, ask it to hurry, and kill it in the end. Ctrl-C meanwhile shortens the wait."""
        for patience in (seconds, _HURRY_SECONDS):
            self.ask_to_stop()
            with contextlib.suppress(KeyboardInterrupt):
                if self._process is None or self.exit_code(patience) is not None:
                    break
        else:
            assert self._process is not None
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._close_life()

    def last_words(self) -> str:
        """The last lines of its log as one line, for an error message."""
        if self.log is None or not self.log.exists():
            return ""
        lines = self.log.read_text(errors="replace").splitlines()
        return " / ".join(line for line in lines[-3:] if line.strip())

    def _close_life(self) -> None:
        if self._life >= 0:
            os.close(self._life)
            self._life = -1


def main() -> None:
    """In the child: run the management command of the arguments; SIGTERM to ourselves when the parent is gone."""
    life = int(sys.argv[1])
    os.set_inheritable(life, False)

    def wait_for_end() -> None:
        with contextlib.suppress(OSError):
            while os.read(life, 1):
                pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait_for_end, name="parent watch", daemon=True).start()
    sys.argv = ["manage.py", *sys.argv[2:]]
    import manage

    sys.exit(manage.main())


if __name__ == "__main__":
    main()
