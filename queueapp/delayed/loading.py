"""Loads the delayed store of a database and opens it: ``setup_infrastructure`` and ``initialize`` before the first use.

A store is opened wherever it is used, in a web process as in a worker: once per process and database, by one thread
while the others wait. After an attempt that raised, the next use tries again, unless the store has refused the
semantics (NotImplementedError, ImproperlyConfigured). A forked child opens a store of its own: connections are not
shared with the parent.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.db import DataError, Error, IntegrityError, InternalError, connections, router, transaction
from django.db.transaction import TransactionManagementError
from django.utils.module_loading import import_string

from .. import registry
from ..circuit_breaker import CircuitBreaker
from ..conf import settings
from ..errors import InvalidMessage, InvalidOption, SemanticsRefused
from ..models.delivery import Semantics
from ..sql import ErrorKind, backend_of
from .store import DelayedStore, DelayedStoreWithInfrastructure, SqlDelayedStore

#: A store that was opened for one of these honours those behind it as well.
STRONGEST_FIRST = (Semantics.TRANSACTIONAL, Semantics.AT_LEAST_ONCE, Semantics.AT_MOST_ONCE)


class _Opening:
    """A store, and for which semantics it has been opened in this process."""

    def __init__(self, store: DelayedStore) -> None:
        self.store = store
        self.semantics: Semantics | None = None
        #: Semantics that the store does not honour. They are not asked for again.
        self.refused: dict[Semantics, SemanticsRefused] = {}
        self._lock = threading.Lock()
        self._is_set_up = not isinstance(store, DelayedStoreWithInfrastructure)
        #: Set up in a transaction that has not ended: the connection, and what it calls at its commit.
        self._pending: tuple[Any, Callable[[], None]] | None = None

    def open(self, wanted: Semantics) -> None:
        """Raises SemanticsRefused, and what the store raises."""
        if self.is_open(wanted):
            return
        with self._lock:
            if self.is_open(wanted):
                return
            if (refusal := self.refused.get(wanted)) is not None:
                raise refusal
            store = self.store
            try:
                if isinstance(store, DelayedStoreWithInfrastructure) and not self._has_infrastructure():
                    store.setup_infrastructure()
                    self._note_set_up()
                store.initialize(endpoint_of(store.alias), wanted)
            except (NotImplementedError, ImproperlyConfigured) as error:
                raise self.refuse(wanted, error) from error
            self.semantics = wanted

    def refuse(self, wanted: Semantics, error: BaseException) -> SemanticsRefused:
        """Remember that the store does not honour these semantics."""
        self.refused[wanted] = SemanticsRefused(self.store, wanted, error)
        return self.refused[wanted]

    def is_open(self, wanted: Semantics) -> bool:
        return self.semantics is not None and _honours(self.semantics, wanted) and self._has_infrastructure()

    def _note_set_up(self) -> None:
        connection = connections[self.store.alias]
        if not connection.in_atomic_block:
            self._is_set_up = True
            return

        # What was set up may be in this very transaction, and is rolled back with it.
        def commit() -> None:
            self._is_set_up = True

        self._pending = (connection, commit)
        transaction.on_commit(commit, using=self.store.alias)

    def _has_infrastructure(self) -> bool:
        if self._is_set_up or self._pending is None:
            return self._is_set_up
        connection, commit = self._pending
        # Django drops the hooks of what is rolled back, a savepoint included.
        return connections[self.store.alias] is connection and any(commit in hook for hook in connection.run_on_commit)


_making = threading.Lock()
_made: list[_Opening] = []
#: What a forked child got from its parent. Their destructors might end the parent's sessions.
_of_a_parent: list[_Opening] = []


def store_class(path: str | None = None) -> type[DelayedStore]:
    """The class of the delayed store that is configured, or that this path names. Raises InvalidOption."""
    path = settings.DELAYED_STORE if path is None else path
    try:
        cls = import_string(path)
    except ImportError as error:
        raise InvalidOption("QUEUEAPP.DELAYED_STORE", path, f"the dotted path of a class ({error})") from error
    if not (isinstance(cls, type) and issubclass(cls, DelayedStore)):
        raise InvalidOption("QUEUEAPP.DELAYED_STORE", path, "a subclass of queueapp.delayed.DelayedStore")
    return cls


@lru_cache(maxsize=64)
def _store(path: str, alias: str) -> _Opening:
    _made.append(_Opening(store_class(path)(alias)))
    return _made[-1]


def _forked() -> None:
    global _making
    _making = threading.Lock()
    _of_a_parent.extend(_made)
    _made.clear()
    _store.cache_clear()


os.register_at_fork(after_in_child=_forked)


def forget() -> None:
    """Load every store anew at its next use (tests)."""
    _store.cache_clear()


def _opening_of(alias: str) -> _Opening:
    with _making:
        return _store(settings.DELAYED_STORE, alias)


def store_of(alias: str) -> DelayedStore:
    """The delayed store of a database, as configured, opened or not. Raises InvalidOption."""
    return _opening_of(alias).store


def is_built_in(store: DelayedStore) -> bool:
    """Whether a store is the table beside the queues, which has statements of its own. A subclass may do as it
    likes."""
    return type(store) is SqlDelayedStore


def open_store(alias: str, semantics: Semantics) -> DelayedStore:
    """The delayed store of a database, opened for a queue of these semantics. Raises InvalidOption, and what the store
    raises: it cannot be reached, or does not honour the semantics."""
    opening = _opening_of(alias)
    opening.open(semantics)
    return opening.store


def open_for_dispatch(alias: str) -> tuple[DelayedStore, Semantics]:
    """The store opened for what is dispatched to the queues of this process, and the semantics that it honours: the
    strongest of theirs that it does not refuse, since no message for the others can be sent by it. Raises
    SemanticsRefused where it refuses all of them, and what the store raises."""
    opening = _opening_of(alias)
    used = {queue.delivery.semantics for queue in registry.queues if router.db_for_write(queue) == alias}
    wanted = [semantics for semantics in STRONGEST_FIRST if semantics in used] or [Semantics.AT_LEAST_ONCE]
    failed: dict[Semantics, Exception] = {}
    for semantics in wanted:
        try:
            opening.open(semantics)
        except (Error, OSError):
            raise  # the store is away, and refuses nothing
        except Exception as error:
            failed[semantics] = error
            if semantics is wanted[-1]:
                raise
        else:
            # It can be reached, so what failed before is a refusal, whatever was raised.
            for stronger in failed.keys() - opening.refused.keys():
                opening.refuse(stronger, failed[stronger])
            return opening.store, semantics
    raise AssertionError("unreachable")


def open_for_any(alias: str) -> DelayedStore:
    """The store opened for looking at it or changing it by hand: as it is open already, or else as for dispatch."""
    opening = _opening_of(alias)
    if not opening.is_open(STRONGEST_FIRST[-1]):
        open_for_dispatch(alias)
    return opening.store


def endpoint_of(alias: str) -> str:
    """The name under which a store keeps what belongs to a database: the same in every process, another one in
    tests."""
    return f"{connections[alias].settings_dict['NAME'] or 'database'}.{alias}"


def _honours(opened: Semantics, wanted: Semantics) -> bool:
    return STRONGEST_FIRST.index(opened) <= STRONGEST_FIRST.index(wanted)


# -- which databases keep delayed messages for queues of other ones: what queues say in ``Delivery.delayed_in``
# ---------
#
# Such a message is addressed to ``label@alias``, by the alias of the queue's database. No queue of the store's own
# database answers to that, so its ordinary dispatcher, and any version that knows of no such messages, leaves it alone;
# one forwarder for each pair of databases moves it.


def stores_of(queue: Any) -> list[str]:
    """The databases that may keep delayed messages for a queue beside its own."""
    own_alias = router.db_for_write(queue)
    return [alias for alias in dict.fromkeys(queue.delivery.delayed_in) if alias != own_alias]


def addresses(alias: str) -> dict[str, list[str]]:
    """What messages that are kept in this database may be addressed to elsewhere, by the database they go to."""
    found: dict[str, list[str]] = {}
    for queue in registry.queues:
        if alias in stores_of(queue):
            target = router.db_for_write(queue)
            found.setdefault(target, []).append(registry.address(queue, target))
    return found


# -- the breakers of storing: one per store and process, fed by ``send(delay=)`` and by delayed retries ----------------
#
# A worker that stores a delayed retry waits as its breaker says. A ``send`` does not: its caller has the exception, and
# may be a request. There it is in the log, as critical once the breaker is open, and in ``store_breakers``.


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
