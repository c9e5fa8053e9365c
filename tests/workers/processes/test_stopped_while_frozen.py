"""A SIGTERM that comes while a process stands still: whichever of its threads runs first again is given the signal."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.in_process_worker import eventually
from tests.testapp.models import Leased
from tests.workers.trees import Tree, children_of


def test_processes_with_a_stop_request_while_frozen_end_when_they_continue(start_tree: Callable[..., Tree]) -> None:
    tree = start_tree(Leased._meta.label, "--processes", "4")
    tree.wait_for_workers(4)
    children = children_of(tree.process.pid)
    for child in children:
        os.kill(child, signal.SIGSTOP)
        eventually(lambda child=child: psutil.Process(child).status() == psutil.STATUS_STOPPED)
    tree.process.send_signal(signal.SIGTERM)
    eventually(lambda: _pending(children))
    for child in children:
        os.kill(child, signal.SIGCONT)

    assert tree.wait() == 0, tree.output
    assert "did not stop" not in tree.output


def _pending(children: list[int]) -> bool:
    """Whether each of them has a SIGTERM that waits for it."""
    masks = [
        int(line.split()[1], 16)
        for child in children
        for line in Path(f"/proc/{child}/status").read_text().splitlines()
        if line.startswith("ShdPnd")
    ]
    return all(mask & (1 << (signal.SIGTERM - 1)) for mask in masks)
