"""Real worker processes on the test database."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

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
