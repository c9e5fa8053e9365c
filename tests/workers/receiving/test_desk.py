"""What tasks share: how often what held nothing for this process is read again, and that what came back is looked for."""

from __future__ import annotations

from time import monotonic
from typing import Any

import pytest
from django.db import connections

from queueapp.sql.claims import SeqRange
from tests.databases import statements_of
from tests.in_process_worker import eventually, real_commits
from tests.testapp.models import Leased
from tests.workers.receiving.batches import SingleReceiver


@real_commits
def test_what_held_nothing_is_read_again_for_a_tenth_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    state = SingleReceiver(Leased).pump.state
    state.claims.extend_skipped(SeqRange(1), 5)
    statements = statements_of(connections["default"], "claims")
    read_heads, reads = statements.read_heads, list[float]()

    def slowly(self: Any, *arguments: Any) -> Any:
        reads.append(monotonic())
        while monotonic() < reads[-1] + 0.02:
            pass
        return read_heads(self, *arguments)

    monkeypatch.setattr(statements, "read_heads", slowly)
    state.skipped.reread(1)
    state.skipped.reread(1)
    assert len(reads) == 1
    eventually(lambda: state.skipped.reread(1) or len(reads) == 2)

    assert reads[1] - reads[0] >= 10 * 0.02


@real_commits
def test_what_is_to_be_received_again_is_looked_for_at_once() -> None:
    pump = SingleReceiver(Leased).pump
    pump.schedule.is_due = False

    pump.state.messages_returned([7, 5])

    assert pump.schedule.is_due
    assert pump.schedule.wake.is_set()
    assert pump.stats.returned == 2
