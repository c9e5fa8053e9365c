"""Each test runs on every database that there is, with an app of Celery's whose results are kept there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from celery.app.task import Context

from queueapp.contrib.celery.models import CeleryChordPart, CeleryGroup, CeleryResult


@pytest.fixture
def app(alias: str) -> Iterator[Celery]:
    """An app whose messages go nowhere and whose results are in one database, which has none yet."""
    app = Celery("results", broker="memory://", backend=f"queueapp://{alias}", set_as_current=False)
    app.conf.task_default_queue = "results"
    yield app
    app.close()
    for model in (CeleryResult, CeleryGroup, CeleryChordPart):
        model.objects.using(alias).all().delete()


@pytest.fixture
def backend(app: Celery) -> Any:
    """The result backend of the app."""
    return app.backend


def request_of(task_id: str, **given: Any) -> Context:
    """What a worker knows of a task that it runs."""
    facts = {
        "id": task_id,
        "task": "shop.bill",
        "hostname": "worker@here",
        "called_directly": False,
        "delivery_info": {"routing_key": "mail"},
        "args": [1],
        "kwargs": {"n": 2},
    }
    return Context(facts, **given)
