"""Where a worker can be held up in the middle of a receive: by which lock, and how its server tells that it waits
there."""

from __future__ import annotations

from typing import NamedTuple


class Words(NamedTuple):
    """The statements that hold rows, and those that name what a session waits in (as LIKE takes it)."""

    #: Locks that let others read, but not write; exclusive row locks; exclusive table locks.
    from_writing: str
    rows: str
    table: str
    claims: dict[str, str]
    sleeping: str
    acking: str
    recording: dict[str, str]


WORDS = {
    "postgresql": Words(
        from_writing="LOCK TABLE {0} IN SHARE ROW EXCLUSIVE MODE",
        rows="SELECT FROM {0} FOR UPDATE",
        table="LOCK TABLE {0} IN EXCLUSIVE MODE",
        claims={"testapp_leased": 'UPDATE%"{0}"%', "testapp_transactional": 'DELETE%"{0}"%'},
        sleeping="%pg_sleep%",
        acking='DELETE FROM "{0}"%',
        recording={"testapp_leased": "SELECT%FOR UPDATE%", "testapp_transactional": "%FOR UPDATE%"},
    ),
    # S on the table to the end of the transaction lets looks pass and no claim, READPAST or not; U on rows keeps off
    # the ack; X on the table keeps off everybody.
    "microsoft": Words(
        from_writing="SELECT TOP (1) seq FROM {0} WITH (TABLOCK, REPEATABLEREAD)",
        rows="SELECT seq FROM {0} WITH (UPDLOCK, ROWLOCK)",
        table="SELECT TOP (1) seq FROM {0} WITH (TABLOCKX)",
        claims={"testapp_leased": "%{0}%UPDATE m %", "testapp_transactional": "%{0}%DELETE FROM m %"},
        sleeping="%WAITFOR DELAY%",
        acking="%DELETE q %{0}%",
        recording=dict.fromkeys(("testapp_leased", "testapp_transactional"), "%BEGIN TRY SELECT%{0}%UPDLOCK, ROWLOCK%"),
    ),
}
