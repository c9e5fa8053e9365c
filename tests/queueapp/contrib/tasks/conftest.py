"""Each test runs on every database that there is, with a backend that has no tasks yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from django.db import connections, router

from queueapp.consuming.registry import registered
from queueapp.contrib.tasks import consumers
from queueapp.contrib.tasks.compat import task_backends
from queueapp.contrib.tasks.models import Result, TaskQueue
from queueapp.models import DelayedMessage, PoisonMessage
from tests.databases import parametrize_alias
from tests.in_process_worker import Worker, eventually, real_commits

#: The apps whose tables a test may write to.
APPS = [*real_commits.kwargs["available_apps"], "queueapp.contrib.tasks"]
BACKEND = "queueapp.contrib.tasks.QueueBackend"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One case per database."""
    parametrize_alias(metafunc, APPS)


class Place:
    """A router that puts everything of the tasks into one database."""

    def __init__(self, alias: str) -> None:
        self.alias = alias

    def db_for_write(self, model: Any, **hints: Any) -> str | None:
        return self.alias if model._meta.app_label in ("queueapp_tasks", "testapp", "queueapp") else None

    db_for_read = db_for_write


@pytest.fixture
def install_anew() -> Iterator[Callable[[], None]]:
    """Registers the tasks' workers as the settings are now."""
    with ExitStack() as stack:

        def install_anew() -> None:
            stack.enter_context(registered.isolated())
            consumers.forget()
            consumers.install()

        yield install_anew


@pytest.fixture
def configure(settings: Any, install_anew: Callable[[], None]) -> Callable[..., Any]:
    """Sets OPTIONS of the default backend and returns it; its workers are registered anew."""

    def configure(*, queues: Any = ("default", "queue-1"), **options: Any) -> Any:
        settings.TASKS = {"default": {"BACKEND": BACKEND, "QUEUES": list(queues), "OPTIONS": options}}
        install_anew()
        return task_backends["default"]

    return configure


@pytest.fixture
def backend(alias: str, settings: Any, configure: Callable[..., Any]) -> Iterator[Any]:
    """The default backend on one database, without tasks."""
    settings.QUEUEAPP = {"PEEK_DELAY": 0.1, "DISPATCH_INTERVAL": 0.1, "RETRY_DELAY": 0}
    if alias != "default":
        settings.DATABASE_ROUTERS = [Place(alias)]
    yield configure()
    for model in (TaskQueue, Result, DelayedMessage, PoisonMessage):
        model.objects.using(alias).all().delete()


@pytest.fixture
def drain(backend: Any, alias: str) -> Callable[..., None]:
    """Runs a worker until nothing is left to be run now."""

    def drain(queue: Any = TaskQueue, **options: Any) -> None:
        worker = Worker(queue, alias, **options).start()
        try:
            eventually(lambda: not queue.objects.using(alias).exists())
        finally:
            worker.stop()

    return drain


@pytest.fixture
def worker(backend: Any, alias: str) -> Iterator[Callable[..., Worker]]:
    """Starts workers, which are stopped at the end."""
    started: list[Worker] = []

    def start(queue: Any = TaskQueue, **options: Any) -> Worker:
        started.append(Worker(queue, alias, **options).start())
        return started[-1]

    yield start
    for item in started:
        item.stop()


def connection_of(queue: Any) -> Any:
    """The connection that a queue is written to."""
    return connections[router.db_for_write(queue)]
