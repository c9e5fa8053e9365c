"""Which locks a statement takes on SQL Server, and how it names rows without taking more."""

from __future__ import annotations

#: Below lock escalation: a server tries to lock the whole table when one statement holds 5,000 locks on it.
MAX_BATCH = 3_500
#: Takes rows: U locks, never waiting for another taker, whatever READ_COMMITTED_SNAPSHOT says. ROWLOCK and MAX_BATCH
#: keep the server from page and table locks, which READPAST skips whole or cannot skip.
TAKING = "UPDLOCK, READPAST, ROWLOCK, READCOMMITTEDLOCK"
#: Looks at rows: S locks, each given back at once; what an open transaction has changed is passed over. Without
#: READCOMMITTEDLOCK row versions would show what is in flight (NServiceBus #863, #1293).
LOOKING = "READPAST, ROWLOCK, READCOMMITTEDLOCK"
#: Keeps the place of a key, be it there or not, to the end of the transaction. FORCESEEK: a scan, which is planned while the
#: table is small and may stay in the server's plans when it is not, would keep every place that it comes by.
KEEPING = "UPDLOCK, HOLDLOCK, ROWLOCK, FORCESEEK"
#: The keys of a statement as rows, in the order given. The loop join starts here and seeks every key; an IN list may be
#: planned as a scan, while statistics say that the table is small, and a scan waits for each row that is locked.
KEYS = "FROM OPENJSON(%s) WITH ([key] bigint '$') AS k INNER LOOP JOIN"
