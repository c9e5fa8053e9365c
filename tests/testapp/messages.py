"""Message types of the test app."""

import os
import signal
import sys

import msgspec

#: A message of this name kills the worker that reads it, before its handler is called.
DEADLY = "deadly to read"


def die_of(name: str) -> None:
    if name == DEADLY and "workers.processes.child" in sys.orig_argv:
        os.kill(os.getpid(), signal.SIGKILL)


class Ping(msgspec.Struct):
    """Writes one Effect named ``name``; the other fields make its handler misbehave."""

    name: str = "ping"
    fail: int = 0  # raise on the first so many attempts
    sleep_ms: int = 0
    die: bool = False  # kill the process
    keep_lock_ms: int = 0  # C code that keeps the interpreter lock
    tell: bool = False  # write an Effect "… has begun" first

    def __post_init__(self) -> None:
        die_of(self.name)


class Pong(msgspec.Struct):
    """A second type."""

    name: str = "pong"


class Many(msgspec.Struct):
    """Handled by several; writes one Effect each."""

    name: str
    die: bool = False

    def __post_init__(self) -> None:
        die_of(self.name)


class Turn(msgspec.Struct):
    """Tells when its handler began and ended, and in which process."""

    number: int
    sleep_ms: int = 0


class Steps(msgspec.Struct):
    """A long work in steps, whose process is killed once after each of these."""

    count: int
    die_after: list[int] = []


class Nop(msgspec.Struct):
    """Does nothing at all: benchmarks."""

    number: int
    text: str
