"""Handlers in C code: one that keeps the interpreter lock is handled once, one that exceeds its limit is ended with its
process alone, and one that cannot be interrupted does not stop the other handlers of its process."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from queueapp.operations import control
from tests.in_process_worker import DEADLINE, eventually, real_commits
from tests.testapp.messages import Ping
from tests.testapp.models import AtMostOnce, Effect, Leased, Transactional
from tests.workers.processes.test_http import reported
from tests.workers.processes.test_supervisor import set_up
from tests.workers.trees import Tree

pytestmark = real_commits

SETTINGS = """
from tests.settings import *

QUEUEAPP = {**QUEUEAPP, "DEAD_AFTER": 4, "HEARTBEAT_INTERVAL": 0.4, "PEEK_DELAY": 0.2, "CRASH_TRACKING_PERIOD": 60}
"""
Start = Callable[..., Tree]


def names() -> list[str]:
    return list(Effect.objects.order_by("pk").values_list("name", flat=True))


@pytest.mark.parametrize("queue", [Leased, Transactional, AtMostOnce], ids=lambda queue: queue.__name__)
def test_a_handler_that_keeps_the_interpreter_lock_beyond_its_lease_runs_once(
    start_tree: Start, child_environment: dict[str, str], tmp_path: Path, queue: type
) -> None:
    set_up(child_environment, tmp_path, "stalled", SETTINGS)
    if queue is Leased:
        control.set_option(Leased, "lease_period", timedelta(seconds=4))
    tree = start_tree(queue._meta.label, "--processes", "2", "--http", "0")  # type: ignore[attr-defined]
    tree.wait_for_workers(2)
    queue.send(Ping("locked", tell=True, keep_lock_ms=12_000))  # type: ignore[attr-defined]

    eventually(lambda: any(process["kept_alive"] for process in reported(tree, "/healthz")[1]["processes"]))
    eventually(lambda: "locked" in names(), 2 * DEADLINE)
    eventually(lambda: not queue.objects.exists())  # type: ignore[attr-defined]

    if queue is not Transactional:  # which rolls the note of its start back, or commits it with the rest
        assert names() == ["locked has begun", "locked"]
    assert "has executed no Python code for" in tree.output
    assert "stopped without deregistering" not in tree.output
    assert tree.terminate() == 0, tree.output


def test_a_handler_past_its_limit_in_c_code_is_ended_with_its_process_alone(
    start_tree: Start, child_environment: dict[str, str], tmp_path: Path
) -> None:
    limits = SETTINGS.replace(
        '"DEAD_AFTER": 4', '"DEAD_AFTER": 2, "TIMEOUT": 1, "STUCK_HANDLER_AFTER": 1, "ATTEMPTS": 1'
    )
    set_up(child_environment, tmp_path, "limited", limits)
    tree = start_tree("testapp.Leased", "--processes", "2", "--concurrency", "1")
    tree.wait_for_workers(2)
    Leased.send(Ping("locked", keep_lock_ms=120_000))

    eventually(lambda: "a handler exceeded its time limit of 1 s in C code" in tree.output, 2 * DEADLINE)
    Leased.send(Ping("another"))
    eventually(lambda: "another" in names(), 2 * DEADLINE)
    assert tree.output.count("was killed by its supervisor") >= 1


def test_a_stuck_handler_is_replaced_first_and_healthy_handlers_run_to_their_end(
    start_tree: Start, child_environment: dict[str, str], tmp_path: Path
) -> None:
    limits = SETTINGS.replace(
        '"DEAD_AFTER": 4', '"DEAD_AFTER": 5, "TIMEOUT": 8, "STUCK_HANDLER_AFTER": 0.5, "SHUTDOWN_GRACE": 1'
    )
    set_up(child_environment, tmp_path, "stuck", limits)
    tree = start_tree("testapp.Leased", "testapp.AtMostOnce", "--concurrency", "2")
    (old,) = tree.wait_for_workers()
    Leased.send(Ping("stuck", tell=True, sleep_ms=120_000))
    eventually(lambda: "stuck has begun" in names())
    threading_pause(4.0)
    AtMostOnce.send(Ping("healthy", tell=True, sleep_ms=7000))

    eventually(lambda: "starting its replacement" in tree.output, 2 * DEADLINE)
    eventually(lambda: set(tree.workers) - {old}, 2 * DEADLINE)
    eventually(lambda: "healthy" in names(), 2 * DEADLINE)
    assert names().count("healthy has begun") == 1, "it was not interrupted"
    eventually(lambda: "could not be interrupted" in tree.output, 2 * DEADLINE)
    Leased.send(Ping("later"))
    eventually(lambda: "later" in names(), 2 * DEADLINE)


def threading_pause(seconds: float) -> None:
    """Let a handler come so near to its limit."""
    import threading

    threading.Event().wait(seconds)
