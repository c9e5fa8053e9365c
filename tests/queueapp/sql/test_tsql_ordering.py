"""The T-SQL of a claim by keys: what it locks, and what it waits for."""

from __future__ import annotations

from time import monotonic
from typing import Any

import pytest
from django.db import connections
from sqlglot import exp

from queueapp.sql.claims import SeqRange
from queueapp.sql.sqlserver.backend import SqlServerBackend
from queueapp.sql.sqlserver.statements import LOOKING, TAKING
from queueapp.sql.tables import QueueTable
from tests.queueapp.sql.test_tsql_parses import OWNER, TOKEN, kinds
from tests.queueapp.sql.tsql import Recorder, hints, never_connected, parsed, placeholders
from tests.testapp.models import LimitedPerKey, Ordered, RatedPerKey, Shared, Weighted


def test_a_claim_locks_what_it_finds_and_counts_what_is_locked_by_others() -> None:
    recorder = Recorder()
    claims = SqlServerBackend().queue(QueueTable.of(Ordered)).claims
    claims.claim_by_lease(never_connected(recorder), [SeqRange(7, 9), SeqRange(20)], 5, TOKEN, OWNER, 1000)

    first, *rest = recorder.statements
    found = parsed(first.sql)
    assert [kind for part in found for kind in kinds([part])] == [exp.Update]
    given = [set(item) for part in found for _, item in hints([part]) if item]
    assert sorted(map(sorted, given)) == sorted(
        map(sorted, [{"ROWLOCK"}, set(TAKING.split(", ")), set(LOOKING.split(", ")), {"READCOMMITTEDLOCK", "ROWLOCK"}])
    )
    assert first.params[-3:] == (5, 7, 9)
    assert len(rest) == 1


@pytest.mark.parametrize("queue", [Shared, Weighted, LimitedPerKey, RatedPerKey], ids=lambda queue: queue.__name__)
def test_keys_take_turns_in_one_batch_which_only_a_count_lets_wait(queue: Any, request: pytest.FixtureRequest) -> None:
    recorder = Recorder()
    claims = SqlServerBackend().queue(QueueTable.of(queue)).claims
    is_limited = queue in (LimitedPerKey, RatedPerKey)
    connection = connections["recorded"] = never_connected(recorder)
    request.addfinalizer(lambda: connections.__delitem__("recorded"))
    connection.in_atomic_block = True  # a caller's transaction
    recorder.answers = [*([[(0,)]] if is_limited else []), [("acme", 1, -2_000_000)]]
    begun = monotonic()
    claims.claim_by_lease(connection, [SeqRange(7, 9), SeqRange(20)], 5, TOKEN, OWNER, 1000)

    *locking, batch = recorder.statements
    assert len(locking) == is_limited
    assert all("sp_getapplock" in statement.sql for statement in locking)
    assert batch.params[:6] == ("", 0, 5, 5, 7, f"[[7,9],[20,{2**63 - 1}]]")
    found = parsed(batch.sql)
    assert placeholders(found) == len(batch.params)
    unhinted = [table for part in found for table in part.find_all(exp.Table) if table.alias == "b"]
    assert len(unhinted) == (queue is LimitedPerKey)  # the count, which waits for locked rows
    given = {frozenset(item) for part in found for _, item in hints([part]) if item}
    of_buckets = ["UPDLOCK, ROWLOCK"] if queue is RatedPerKey else []
    assert given == {frozenset(text.split(", ")) for text in (LOOKING, TAKING, "ROWLOCK", *of_buckets)}

    assert claims.turns is not None
    assert claims.turns.held_back_until >= begun + 2
    recorder.answers = [*([[(0,)]] if is_limited else []), [("b", 1, None)]]
    claims.claim_by_lease(connection, [SeqRange(7)], 5, TOKEN, OWNER, 1000)
    assert recorder.statements[-1].params[:6] == ("acme", 0, 5, 5, 7, "[]")
    assert claims.turns.held_back_until == 0
