"""The breakers of storing: one per store and process, fed by ``send(delay=)`` wherever it is called and by delayed
retries.

A worker that stores a delayed retry waits as its breaker says. A ``send`` does not: its caller has the exception, and
may be a request. There it is in the log, as critical once the breaker is open, and in ``store_breakers``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.core.signals import setting_changed
from django.db import DataError, Error, IntegrityError, InternalError, connections
from django.db.transaction import TransactionManagementError

from ..circuit_breaker import CircuitBreaker
from ..conf import settings
from ..errors import InvalidMessage, InvalidOption
from ..sql import ErrorKind, backend_of
from .loading import is_built_in
from .store import DelayedStore

_breakers: dict[tuple[str, str], CircuitBreaker] = {}
#: The message's fault, or that of the transaction it was to be stored in.
_NOT_THE_STORES = (DataError, IntegrityError, InternalError, TransactionManagementError, InvalidMessage, InvalidOption)


def store_breaker(alias: str, store: DelayedStore | None = None) -> CircuitBreaker:
    """The breaker of a database's delayed table, or of another store."""
    path = "" if store is None or is_built_in(store) else f"{type(store).__module__}.{type(store).__qualname__}"
    found = _breakers.get((alias, path))
    if found is None:
        name = f"Store of delayed messages in {alias}" + (f" ({path})" if path else "")
        made = CircuitBreaker(name, settings.TIME_TO_TRIGGER_STORE_CIRCUIT_BREAKER, kind="delayed_store", subject=alias)
        found = _breakers.setdefault((alias, path), made)
    return found


def store_breakers(alias: str) -> list[CircuitBreaker]:
    """The breakers of storing that this process has for a database."""
    return [breaker for (of, _), breaker in sorted(_breakers.items()) if of == alias]


@contextmanager
def storing(alias: str, store: DelayedStore | None = None) -> Iterator[None]:
    """Around storing a message, in the table unless in this store: feeds the breaker, and raises what was raised."""
    try:
        yield
    except Exception as error:
        deadlock = isinstance(error, Error) and backend_of(connections[alias]).error_kind(error) is ErrorKind.DEADLOCK
        if not deadlock and not isinstance(error, _NOT_THE_STORES):
            store_breaker(alias, store).failure(error)
        raise
    store_breaker(alias, store).success()


def _forget(*, setting: str = "QUEUEAPP", **_: Any) -> None:
    """Other settings, or another process: a lock of the parent's may be held for ever."""
    if setting == "QUEUEAPP":
        _breakers.clear()


setting_changed.connect(_forget, dispatch_uid="queueapp.delayed.breakers")
os.register_at_fork(after_in_child=_forget)
