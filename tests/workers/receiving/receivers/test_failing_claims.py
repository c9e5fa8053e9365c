"""A claim that the database refuses, or does not answer: the task waits as its breaker says, and claims again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from django.db import OperationalError, connection

from queueapp import consumer
from tests.databases import statements_of
from tests.in_process_worker import Worker, eventually, real_commits
from tests.testapp.messages import Nop
from tests.testapp.models import AtMostOnce, Leased, Transactional

pytestmark = [real_commits, pytest.mark.usefixtures("no_consumers")]


@pytest.mark.parametrize(
    ("queue", "verb"),
    [(AtMostOnce, "claim_by_delete"), (Leased, "claim_by_lease"), (Transactional, "claim_by_delete")],
)
def test_a_claim_that_fails_is_tried_again_by_the_same_task(
    start_worker: Callable[..., Worker],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    queue: Any,
    verb: str,
) -> None:
    really = getattr(statements_of(connection, "claims"), verb)
    claimed_by: list[int] = []

    def claim(self: Any, *arguments: Any, **options: Any) -> Any:
        claimed_by.append(threading.get_ident())
        if len(claimed_by) == 1:
            raise OperationalError("the server is away")
        return really(self, *arguments, **options)

    monkeypatch.setattr(statements_of(connection, "claims"), verb, claim)

    @consumer(queue, name="tests")
    def act(message: Nop) -> None:
        pass

    queue.send(Nop(1, ""))
    worker = start_worker(queue, concurrency=1)
    eventually(lambda: worker.pump.stats.handled == 1)

    assert claimed_by[0] == claimed_by[1]
    assert "a receiver failed" not in caplog.text
    assert f"Receive from testapp.{queue.__name__}" in caplog.text, "its breaker was told"
    assert worker.pump.health.degraded_text() == "", "and of the claim that came through"
