"""What pytest is given to run Celery's own integration tests with: Django, and our result backend under Redis' name.

Dozens of these tests are skipped unless the URL of the results begins with ``redis``. Nearly all of those are about
chords and groups, and use Redis to count in. So the URL is ``redis+queueapp://``, and its first part is registered with
Celery as a name of this backend; the tests count in a Redis of their own.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any

import django
import pytest

django.setup()

from celery.app.backends import BACKEND_ALIASES  # noqa: E402
from celery.contrib.testing.app import DEFAULT_TEST_CONFIG  # noqa: E402

from tests.in_process_worker import eventually  # noqa: E402

# Or Celery closes Django's connections after each task, and each result opens one: a thousand in a test.
DEFAULT_TEST_CONFIG["CELERY_DB_REUSE_MAX"] = 100
BACKEND_ALIASES["redis"] = f"{__name__}:results"


def results(app: Any, url: str) -> Any:
    """Ours, but for a test that means Redis itself."""
    if url.startswith("redis://"):
        from celery.backends.redis import RedisBackend as Backend
    else:
        from queueapp.contrib.celery.results import ResultBackend as Backend
    return Backend(app=app, url=url)


def patient(check: Callable[..., None]) -> Callable[..., None]:
    """Celery's check of a counter, which with ``timeout=0`` asks whether the other forty failed tasks have had their
    errbacks about two seconds after the first: that is about the machine. So it waits until a counter is there, and
    then checks it."""

    def checked(expected_count: int, redis_key: str = "redis-count", timeout: float = 60) -> None:
        if timeout == 0:
            find = inspect.getmodule(check).get_redis_connection  # type: ignore[union-attr]
            eventually(lambda: find().get(redis_key) is not None)
        check(expected_count, redis_key=redis_key, timeout=timeout)

    return checked


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the checks of counters wait on slow machines; without a Redis, skip the tests that count in one, by name."""
    for module in {item.getparent(pytest.Module) for item in items}:
        found = getattr(module, "obj", None)
        if hasattr(found, "await_redis_count"):
            found.await_redis_count = patient(found.await_redis_count)
    if os.environ.get("REDIS_PORT"):
        return
    for item in items:
        function = getattr(item, "function", None)
        if function is not None and "redis" in inspect.getsource(function):
            item.add_marker(pytest.mark.skip("needs a Redis to count in, and redis-server is not installed"))
