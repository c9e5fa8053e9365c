"""How many messages wait: in the table beside the queues, where delayed retries always are, and in another store."""

from __future__ import annotations

from typing import Any

from django.db import router

from .. import registry
from .dispatch_failures import FetchFailed, step
from .loading import is_built_in, open_for_any, store_of
from .sql_store import SqlDelayedStore
from .store import DelayedStore


def waiting(alias: str, destination: str, limit: int, *, in_passing: bool = False) -> int:
    """How many delayed messages there are for a queue, by its label; counted up to ``limit``. ``in_passing``: for a
    figure, which does not wait for locks and may miss what an open transaction has. Raises MissingVerb when another
    store cannot tell, and FetchFailed when it cannot be asked."""
    own = SqlDelayedStore(alias)
    found = own.count_in_passing(destination, limit) if in_passing else own.count(destination, limit)
    store = store_of(alias)
    if found < limit and not is_built_in(store):
        with step(FetchFailed, alias):
            found += open_for_any(alias).count(destination, limit - found)
    return min(found, limit)


def kept_in(store: str, queue: Any, limit: int) -> int:
    """How many messages one of the ``stores_of`` a queue keeps for it; counted up to ``limit``."""
    return SqlDelayedStore(store).count(registry.address(queue, router.db_for_write(queue)), limit)


def can_count(alias: str) -> bool:
    """Whether ``waiting`` can be told of this database."""
    return type(store_of(alias)).count is not DelayedStore.count
