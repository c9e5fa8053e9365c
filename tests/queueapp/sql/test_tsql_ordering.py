"""The T-SQL of a claim with ordering keys: what it locks, and what it waits for."""

from __future__ import annotations

from sqlglot import exp

from queueapp.sql.claims import SeqRange
from queueapp.sql.sqlserver.backend import SqlServerBackend
from queueapp.sql.sqlserver.statements import LOOKING, TAKING
from queueapp.sql.tables import QueueTable
from tests.queueapp.sql.test_tsql_parses import OWNER, TOKEN, kinds
from tests.queueapp.sql.tsql import Recorder, hints, never_connected, parsed
from tests.testapp.models import Ordered


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
