"""The prepared transactions of the Spark sink (option ``two_phase``), for psycopg and ADBC. SQL Server has none.

    attempt    not recorded, NUMBER, COPY into the queue, LOCK_SESSION (shared), not recorded, prepare
    driver     lock (shared), FOUND and the ledger row in one transaction; then commit each
    janitor    lock (exclusive), the ledger's list, LISTED, roll back what is not on it

The lock keeps a janitor from rolling back what a driver has found and not yet recorded, and an attempt that is late
from preparing what would be left over: it comes before the janitor of its driver, or finds the ledger row. PREPARE,
COMMIT and ROLLBACK take a literal and no parameter; a ``PreparedName`` consists of letters, digits and underscores.
"""

from __future__ import annotations

from ..spark import LedgerTable, PreparedName
from .statements import quote, quote_table

#: The advisory lock: the first bytes of "prepared".
_LOCK = int.from_bytes(b"prepared", "big") >> 1

# No table: a setting of the server.
LIMIT = "SELECT current_setting('max_prepared_transactions')::bigint"

# No table. The number of the caller's transaction, which it has from here on.
NUMBER = "SELECT pg_current_xact_id()::text::bigint"

# No index: a view of the server's memory, of at most max_prepared_transactions rows. Safe: what is prepared later
# belongs to an attempt that is not done; others' transactions cannot be finished by this user.
LISTED = (
    "SELECT gid, extract(epoch FROM clock_timestamp() - prepared)::float8 FROM pg_prepared_xacts "
    r"WHERE gid LIKE 'queueapp\_spark\_%%' AND database = current_database() AND owner = current_user"
)

# The same view. Safe: the caller holds the lock, so what is found stays.
FOUND = "SELECT gid FROM pg_prepared_xacts WHERE gid = ANY(%s) AND database = current_database()"

# No table: the commit log. 'committed', 'aborted', 'in progress', or NULL when it is too long ago.
STATUS = "SELECT pg_xact_status(%s::text::xid8)"


def lock(*, exclusive: bool) -> str:
    """Until the end of the transaction; waits."""
    return f"SELECT pg_advisory_xact_lock{'' if exclusive else '_shared'}({_LOCK})"


# One value. The lock of the session, and not of the transaction, which would hold it while it is prepared.
LOCK_SESSION = f"SELECT length(pg_advisory_lock_shared({_LOCK})::text)::bigint"


def recorded(ledger: LedgerTable) -> str:
    """One value: how many ledger rows a publication has. Parameters queue, publish_id, batch_id; for ADBC."""
    # Index: the unique (queue, publish_id, batch_id). Safe: the caller holds the lock, and a driver that records the
    # publication later has its janitor still to come.
    kinds = {"queue": "text", "publish_id": "text", "batch_id": "bigint"}
    pairs = zip(kinds.items(), range(1, 4), strict=True)
    where = " AND ".join(f"{quote(ledger.columns[name])} = ${number}::{kind}" for (name, kind), number in pairs)
    return f"SELECT count(*) FROM {quote_table(ledger.db_table)} WHERE {where}".replace("%%", "%")


def prepare(name: PreparedName) -> str:
    """End the transaction in favour of one that outlives the session and the server."""
    return f"PREPARE TRANSACTION '{name.gid}'"


def commit(name: PreparedName) -> str:
    """Outside of a transaction. Fails when it is gone or another session is finishing it."""
    return f"COMMIT PREPARED '{name.gid}'"


def roll_back(name: PreparedName) -> str:
    """The same, without its rows."""
    return f"ROLLBACK PREPARED '{name.gid}'"
