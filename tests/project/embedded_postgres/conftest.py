"""A folder for a server of the test's own, and its users; nothing of either is left after the test."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.project.embedded_postgres.users import User, shut_down


@pytest.fixture
def data(tmp_path: Path) -> Iterator[Path]:
    """A folder for a server of the test's own; the server is stopped and the folder removed afterwards."""
    # The path of a temporary folder is private to this user; a place of its own keeps the ordinary case ordinary.
    directory = Path(f"/tmp/queueapp-test-{os.getpid()}-{tmp_path.name}")
    directory.mkdir(mode=0o755)
    yield directory
    shut_down(directory)
    shutil.rmtree(directory)


@pytest.fixture
def start(data: Path) -> Iterator[Callable[..., User]]:
    users: list[User] = []

    def start_user(*arguments: Any, **named: Any) -> User:
        users.append(User(*(arguments or (data,)), **named))
        return users[-1]

    yield start_user
    for user in users:
        user.kill()
