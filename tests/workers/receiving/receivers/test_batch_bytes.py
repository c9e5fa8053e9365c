"""However large the bodies of a backlog are, a claim brings a bounded part of it into memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from queueapp import consumer
from queueapp.conf import settings as queueapp_settings
from queueapp.sql.claims import BODY
from tests.in_process_worker import Worker, eventually, real_commits
from tests.testapp.models import AtMostOnce, Leased
from workers.receiving.queue_state import QueueState

pytestmark = [real_commits, pytest.mark.usefixtures("no_consumers")]


@pytest.mark.parametrize("queue", [Leased, AtMostOnce])
def test_a_backlog_of_155_megabytes_is_claimed_in_bounded_batches(
    start_worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch, queue: Any
) -> None:
    each, count = 310_000, 500
    claims: list[int] = []
    handled: list[int] = []
    claimed = QueueState.claimed

    def weighing(self: QueueState, rows: Any, full: bool) -> None:
        claims.append(sum(len(row[BODY]) for row in rows))
        claimed(self, rows, full)

    @consumer(queue, name="tests")
    def handler(message: bytes) -> None:
        handled.append(len(message))

    monkeypatch.setattr(QueueState, "claimed", weighing)
    body = b"x" * each
    queue.send_many(body for _ in range(count))
    start_worker(queue, concurrency=2)

    eventually(lambda: len(handled) == count)
    eventually(lambda: not queue.objects.exists())

    assert sum(claims) == each * count == 155_000_000
    assert max(claims) <= queueapp_settings.MAX_BATCH_BYTES == 16 * 2**20
    assert max(claims) > each, "and not one by one"
