"""How many messages wait: in the table beside the queues, where delayed retries always are, and in another store."""

from __future__ import annotations

from .opening import is_built_in, open_for_any, store_of
from .sql_store import SqlDelayedStore
from .store import DelayedStore
from .undelivered import FetchFailed, step


def waiting(alias: str, destination: str, limit: int) -> int:
    """How many delayed messages there are for a queue, by its label; counted up to ``limit``. Raises MissingVerb when another
    store cannot tell, and FetchFailed when it cannot be asked."""
    found = SqlDelayedStore(alias).count(destination, limit)
    store = store_of(alias)
    if found < limit and not is_built_in(store):
        with step(FetchFailed, alias):
            found += open_for_any(alias).count(destination, limit - found)
    return min(found, limit)


def can_count(alias: str) -> bool:
    """Whether ``waiting`` can be told of this database."""
    return type(store_of(alias)).count is not DelayedStore.count
