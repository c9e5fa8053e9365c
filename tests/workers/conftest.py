"""Real worker processes on the test database, and workers in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from queueapp.consuming.registry import registered
from tests.inprocess import Worker
from tests.workers.trees import Tree


@pytest.fixture
def start_tree(child_environment: dict[str, str], tmp_path: Path) -> Iterator[Callable[..., Tree]]:
    """Starts ``manage.py runqueueworker``, or another command; what still runs at the end of the test is killed."""
    trees: list[Tree] = []

    def start(*arguments: str, command: Sequence[str] = ("manage.py", "runqueueworker")) -> Tree:
        trees.append(Tree([*command, *arguments], child_environment, tmp_path / f"tree {len(trees)}.log"))
        return trees[-1]

    yield start
    for tree in trees:
        tree.kill()


@pytest.fixture
def no_consumers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the consumers that the test registers."""
    monkeypatch.setattr(registered, "_by_queue", {})


@pytest.fixture
def start_worker() -> Iterator[Callable[..., Worker]]:
    """Starts workers in this process; they stop with the test."""
    workers: list[Worker] = []

    def start(queue: Any, **options: Any) -> Worker:
        workers.append(Worker(queue, **options).start())
        return workers[-1]

    yield start
    for worker in workers:
        worker.stop()
