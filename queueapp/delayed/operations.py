"""Dropping and rescheduling delayed messages by hand: in the table beside the queues, where delayed retries always are,
and in another store, if it is configured and has the verb."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

from django.db import connections, router
from django.db.models import QuerySet
from django.utils import timezone

from .. import notifier, registry
from ..errors import InvalidMessage, InvalidOption, MissingVerb
from ..models import DelayedMessage, Now
from ..sql import backend_of
from .dispatch import FetchFailed, step
from .store import DelayedStore, SqlDelayedStore, is_built_in, open_for_any, store_of, stores_of

#: More than any store has.
_ALL = 10**9


def cancel(message_id: uuid.UUID, *, using: str = "default") -> int:
    """Drop a delayed message before it is due; returns how many went (0: it is gone, dispatched or unknown). Raises
    MissingVerb when it is in a store that cannot do it."""
    gone = SqlDelayedStore(using).cancel(message_id)
    store = _custom_store(using)
    # A message is in one of them: where the table had it, the store is not asked for a method that it may lack.
    if not gone and store is not None:
        gone = store.cancel(message_id)
    return gone


def reschedule(
    message_id: uuid.UUID, *, delay: timedelta | None = None, at: datetime | None = None, using: str = "default"
) -> int:
    """Make a delayed message due in ``delay`` from now, or ``at`` a time; returns how many were changed. Its expiry,
    which counts from when it is due, moves with it. Raises MissingVerb when it is in a store that cannot do it, and
    InvalidMessage for a value that is no timedelta or no aware datetime."""
    if (delay is None) == (at is None):
        raise ValueError("reschedule needs either delay or at.")
    if delay is not None and not isinstance(delay, timedelta):
        raise InvalidMessage(f"delay = {delay!r} is not accepted: it must be a timedelta (a bare number has no unit).")
    if at is not None and (not isinstance(at, datetime) or timezone.is_naive(at)):
        raise InvalidMessage(f"at = {at!r} is not accepted: it must be an aware datetime.")
    far = timedelta(days=100 * 365)
    if (delay is not None and delay > far) or (at is not None and at > datetime.now(UTC) + far):
        raise InvalidMessage(f"{delay or at!r} is not accepted: it must be within 100 years from now.")
    due: Any = at if at is not None else Now() + delay
    changed = SqlDelayedStore(using).reschedule(message_id, due)
    connection = connections[using]
    store = _custom_store(using)
    if not changed and store is not None:
        changed = store.reschedule(message_id, at or backend_of(connection).now(connection) + (delay or timedelta(0)))
    if changed:
        notifier.delayed(connection)
    return changed


def make_due(messages: QuerySet[DelayedMessage]) -> int:
    """Make delayed messages of the table due now, for the dispatcher to move with its next round; returns how many."""
    changed = messages.update(due=Now())
    if changed:
        notifier.delayed(connections[messages.db])
    return changed


def address_in(alias: str, queue: Any) -> str:
    """What messages that this database keeps for a queue are addressed to. Raises InvalidOption where no dispatcher
    would deliver them from there."""
    own_alias = router.db_for_write(queue)
    if alias == own_alias:
        return str(queue._meta.label)
    if alias in stores_of(queue):
        return registry.address(queue, own_alias)
    accepted = ", ".join(map(repr, [own_alias, *stores_of(queue)]))
    raise InvalidOption("database", alias, f"one that delivers to {queue._meta.label}: {accepted}")


def addressed(name: str, *, using: str = "default") -> int:
    """How many delayed messages go to a destination, of the table and of another store. Raises MissingVerb when that
    cannot tell."""
    store = _custom_store(using)
    in_store = 0 if store is None else store.count(name, _ALL)
    return DelayedMessage.objects.using(using).filter(destination=name).count() + in_store


def readdress(name: str, queue: Any, *, using: str = "default", limit: int = 1000) -> int:
    """Let delayed messages go to another queue when they are due, the first due first: those of the table, then those
    of another store; returns how many, 0: there are no more. ``name`` is the destination they have, of a queue that
    need not exist. Raises InvalidOption, and MissingVerb when there may be some in a store that cannot do it."""
    to = address_in(using, queue)
    if to == name:
        raise InvalidOption("queue", to, "another one than they go to already")
    changed = SqlDelayedStore(using).readdress(name, to, limit)
    if not changed and (store := _custom_store(using)) is not None and _may_have(store, name):
        changed = store.readdress(name, to, limit)
    if changed:
        notifier.delayed(connections[using])
    return changed


def name_of_other_store(alias: str) -> str:
    """The class of the store that keeps what is sent with a delay, in place of the table; '' where that is the table.
    It is not opened."""
    store = store_of(alias)
    return "" if is_built_in(store) else f"{type(store).__module__}.{type(store).__qualname__}"


def _may_have(store: DelayedStore, destination: str) -> bool:
    """Whether a store keeps messages for a destination; True also when it cannot tell."""
    try:
        return store.count(destination, 1) > 0
    except MissingVerb:
        return True


def _custom_store(alias: str) -> DelayedStore | None:
    """The store that is configured in place of the table, opened."""
    return None if is_built_in(store_of(alias)) else open_for_any(alias)


def waiting(alias: str, destination: str, limit: int, *, in_passing: bool = False) -> int:
    """How many delayed messages there are for a queue, by its label; counted up to ``limit``. ``in_passing``: for a
    figure, which does not wait for locks and may miss what an open transaction has. Raises MissingVerb when another
    store cannot tell, and FetchFailed when it cannot be asked."""
    sql_store = SqlDelayedStore(alias)
    found = sql_store.count_in_passing(destination, limit) if in_passing else sql_store.count(destination, limit)
    store = store_of(alias)
    if found < limit and not is_built_in(store):
        with step(FetchFailed, alias):
            found += open_for_any(alias).count(destination, limit - found)
    return min(found, limit)


def kept_in(store: str, queue: Any, limit: int) -> int:
    """How many messages one of the ``stores_of`` a queue keeps for it; counted up to ``limit``."""
    return SqlDelayedStore(store).count(registry.address(queue, router.db_for_write(queue)), limit)


def can_count(alias: str) -> bool:
    """Whether ``waiting`` is known of this database."""
    return type(store_of(alias)).count is not DelayedStore.count
