"""Locks on keys that may not exist yet: application locks by name, held to the end of the transaction.

HOLDLOCK on a key that does not exist would lock the range up to the next key: writers of different keys would wait for
each other, and deadlock when both insert. So a statement that inserts a key unless it exists runs under the lock on its
name, and hints only ``EXISTING``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any

from .errors import DEADLOCKED, LockRefused
from .statements import fetch, json_of

#: Locks a key that exists, and nothing where there is none.
EXISTING = "UPDLOCK, ROWLOCK, FORCESEEK, READCOMMITTEDLOCK"
#: Takes application locks by name, in the order given, until one is refused; returns the last answer.
_LOCK_NAMES = (
    "SET NOCOUNT ON; DECLARE @got int = 0, @name nvarchar(255), @n int = 0, @path nvarchar(20), @names nvarchar(max) = "
    "%s; SET @name = JSON_VALUE(@names, '$[0]'); "
    "WHILE @name IS NOT NULL AND @got >= 0 BEGIN "
    "EXEC @got = sp_getapplock @Resource = @name, @LockMode = 'Exclusive', @LockOwner = 'Transaction', "
    "@LockTimeout = -1; SET @n = @n + 1; SET @path = CONCAT('$[', @n, ']'); SET @name = JSON_VALUE(@names, @path); "
    "END; "
    "SELECT @got"
)
#: Names of one round trip: finding the nth in a JSON array reads those before it.
_NAMES_AT_ONCE = 250


def resource_of(table: str, key: object) -> str:
    """The name of the lock on a key of a table."""
    return f"queueapp key {blake2b(f'{table} {key}'.encode(), digest_size=16).hexdigest()}"


def lock_keys_of(connection: Any, table: str, keys: Iterable[object]) -> None:
    """Lock these keys of a table until the transaction ends. In one order for all sessions, so that they cannot
    deadlock. Raises LockRefused."""
    resources = sorted({resource_of(table, key) for key in keys})
    for first in range(0, len(resources), _NAMES_AT_ONCE):
        # No table is read. Safe: released when the transaction ends in any way.
        answer = int(fetch(connection, _LOCK_NAMES, (json_of(resources[first : first + _NAMES_AT_ONCE]),))[0][0])
        if answer < 0:
            raise LockRefused(f"key of {table}", answer)


def insert_locked(connection: Any, table: str, key: object, sql: str, params: Sequence[Any]) -> int:
    """Run an INSERT under the lock on a key, in one round trip; returns how many rows it inserted. In a transaction of
    its own if there is none: outside of one the lock would be released before the INSERT."""
    number, text = DEADLOCKED
    # No further table is read. Safe: a failure is rolled back here; the transaction of a caller is left to the caller.
    batch = (
        "SET NOCOUNT ON; DECLARE @own bit = CASE WHEN @@TRANCOUNT = 0 THEN 1 ELSE 0 END; DECLARE @held int, @done int; "
        "BEGIN TRY IF @own = 1 BEGIN TRANSACTION; "
        "EXEC @held = sp_getapplock @Resource = %s, @LockMode = 'Exclusive', @LockOwner = 'Transaction', "
        f"@LockTimeout = -1; IF @held = -3 THROW {number}, '{text}', 1; "
        "IF @held < 0 THROW 51000, 'The lock of the key was not granted.', 1; "
        f"{sql}; SET @done = @@ROWCOUNT; IF @own = 1 COMMIT TRANSACTION; END TRY "
        "BEGIN CATCH IF @own = 1 AND @@TRANCOUNT > 0 ROLLBACK TRANSACTION; THROW; END CATCH; SELECT @done"
    )
    return int(fetch(connection, batch, (resource_of(table, key), *params))[0][0])
