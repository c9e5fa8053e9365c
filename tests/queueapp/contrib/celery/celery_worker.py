"""A worker of Celery as a process of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.in_process_worker import DEADLINE, eventually
from tests.workers.trees import Tree


def start_celery_worker(pool: str, name: str, environment: Mapping[str, str], log: Path, *arguments: str) -> Tree:
    """``celery worker`` with two at once, not waited for."""
    command = [
        "-m",
        "celery",
        "-A",
        "tests.queueapp.contrib.celery.celeryapp",
        "worker",
        "--loglevel",
        "INFO",
        "--pool",
        pool,
    ]
    command += ["--concurrency", "2", "--hostname", f"{name}@tests", *arguments]
    return Tree(command, environment, log)


def wait_until_ready(tree: Tree) -> None:
    eventually(lambda: " ready." in tree.output or tree.process.poll() is not None, 3 * DEADLINE)
    assert tree.process.poll() is None, tree.output
