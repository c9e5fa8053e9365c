"""Options of a queue that an operator sets without a deploy, and the values that are in effect in this process.

    operations.control --row of QueueControl--> heartbeat of each worker (``load``), every second
                                            --> other processes: one query per database, if their values are older than
                                                ``MAX_AGE``

Claims and ``receive()`` ask here each time; senders do not. One query reads the overrides of all queues of a database,
so a queue without overrides costs no query of its own. ``sql`` asks here as well, so this module imports no model.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from datetime import timedelta
from time import monotonic
from typing import Any

from django.apps import apps
from django.db import DatabaseError, connections, router, transaction

from . import registry

log = logging.getLogger("queueapp")

#: The options that can be set: columns of ``QueueControl`` with the names of the options of ``class Delivery``.
SETTABLE = ("max_backlog", "target_queue_depth", "lease_period", "expiration")
#: Seconds for which a process without a heartbeat uses the values that it read.
MAX_AGE = 5.0
#: Seconds for which a process uses the values of a heartbeat, which loads them each second.
MAX_AGE_OF_HEARTBEAT = 60.0

#: Attribute of a connection whose open transaction has set an override.
_SET_HERE = "_queueapp_set_here"

#: The overrides of one queue, without the options that are not set.
Overrides = Mapping[str, Any]
_NOTHING: Overrides = {}

#: Increases with every change of a value that statements depend on: a cache of statements compares it.
version = 0
_lease_periods: dict[tuple[Any, str], timedelta | None] = {}
_expirations: dict[tuple[Any, str], timedelta | None] = {}

#: By database: until when the overrides are used, and the overrides by queue.
_loaded: dict[str, tuple[float, Mapping[str, Overrides]]] = {}
#: By database: when the query of the loaded overrides began, or an override was set here. The result of an older query
#: is ignored.
_asked: dict[str, float] = {}
_lock = threading.Lock()


def _forked() -> None:
    global _lock
    _lock = threading.Lock()  # a thread of the parent may have held it


os.register_at_fork(after_in_child=_forked)


class _Declared:
    """The value that the class declares."""

    def __repr__(self) -> str:
        return "DECLARED"


DECLARED: Any = _Declared()


# -- values in effect -------------------------------------------------------------------------------------------------


def effective_value(queue: Any, name: str, alias: str) -> Any:
    """The value of one of ``SETTABLE`` that is in effect: the override, else the declared value; None for an option
    that this version does not have. May query the database (``MAX_AGE``), in the caller's transaction if there is
    one."""
    value = _overrides(alias).get(queue._meta.label, _NOTHING).get(name)
    return getattr(queue.delivery, name, None) if value is None else value


def affects(queue: Any) -> bool:
    """Whether an override can change how messages of this queue are received."""
    delivery = queue.delivery
    leases = delivery.semantics.name == "AT_LEAST_ONCE" or delivery.keeps_in_flight
    return leases or delivery.expires_by_age or delivery.max_backlog is not None


def lease_period(queue: Any, alias: str) -> timedelta | None:
    """The lease period in effect; None: leases do not expire. Never queries the database."""
    declared: timedelta | None = queue.delivery.lease_period
    return _lease_periods.get((queue, alias), declared) if _lease_periods else declared


def expiration(queue: Any, alias: str) -> timedelta | None:
    """The expiration in effect; None: messages do not expire by age. Only a queue that ``expires_by_age`` can have an
    override. Never queries the database."""
    declared: timedelta | None = queue.delivery.expiration
    return _expirations.get((queue, alias), declared) if _expirations else declared


def override(queue: Any, alias: str, *, lease_period: Any = DECLARED, expiration: Any = DECLARED) -> bool:
    """Set the values that ``lease_period`` and ``expiration`` return: a timedelta, None or ``DECLARED``. Returns
    whether one changed."""
    global version
    changed = False
    for values, value in ((_lease_periods, lease_period), (_expirations, expiration)):
        key = queue, alias
        if values.get(key, DECLARED) == value:
            continue
        changed = True
        if value is DECLARED:
            del values[key]
        else:
            values[key] = value
    if changed:
        version += 1
    return changed


# -- loading ----------------------------------------------------------------------------------------------------------


def load(alias: str, overrides: Mapping[str, Overrides], asked: float | None = None) -> None:
    """Use the overrides that a heartbeat has read, by queue. ``asked``: the ``monotonic`` time when its query began;
    default: now."""
    _load(alias, overrides, MAX_AGE_OF_HEARTBEAT, monotonic() if asked is None else asked)


def refresh(alias: str) -> None:
    """Query the overrides if the loaded ones are too old, as ``effective_value`` does."""
    _overrides(alias)


def reload(alias: str) -> Mapping[str, Overrides]:
    """Query the overrides of a database, use them from now on, and return them by queue. Raises DatabaseError."""
    asked, overrides = monotonic(), _read(alias)
    if _is_unsure(connections[alias]):
        return overrides
    loaded = _loaded.get(alias)
    if loaded is None or loaded[0] < monotonic() + MAX_AGE:  # else a heartbeat loads them
        _load(alias, overrides, MAX_AGE, asked)
    return overrides


def forget(alias: str | None = None) -> None:
    """Query the overrides at the next use: one was just set here."""
    with _lock:
        for name in connections if alias is None else (alias,):
            _loaded.pop(name, None)
            _asked[name] = monotonic()


def set_here(alias: str) -> None:
    """An override was just set by this connection. Until its transaction ends, what it reads is valid for itself
    only."""
    forget(alias)
    connection = connections[alias]

    def committed() -> None:
        connection.__dict__.pop(_SET_HERE, None)
        forget(alias)  # other threads may have read the old value meanwhile

    if connection.in_atomic_block:
        connection.__dict__[_SET_HERE] = True
        transaction.on_commit(committed, using=alias)


def from_columns(values: Sequence[Any]) -> Overrides:
    """The overrides in columns in the order of ``SETTABLE``."""
    return {name: value for name, value in zip(SETTABLE, values, strict=True) if value is not None}


def _overrides(alias: str) -> Mapping[str, Overrides]:
    asked, loaded = monotonic(), _loaded.get(alias)
    unsure = _is_unsure(connections[alias])
    if loaded is not None and monotonic() < loaded[0] and not unsure:
        return loaded[1]
    overrides = _read_safely(alias)
    if unsure and overrides is not None:
        return overrides
    if overrides is None:  # keep the old ones for a while
        overrides = loaded[1] if loaded is not None else {}
    _load(alias, overrides, MAX_AGE, asked)
    return overrides


def _load(alias: str, overrides: Mapping[str, Overrides], age: float, asked: float) -> None:
    """Use these overrides for ``age`` seconds, unless newer ones are loaded. Threads query concurrently, and a delayed
    one has the values from before a change: observed on a busy machine, where a heartbeat undid for a second what had
    just been set."""
    with _lock:
        if asked < _asked.get(alias, asked):
            return
        _asked[alias] = asked
        _loaded[alias] = monotonic() + age, overrides
        for queue in registry.queues:
            changed = overrides.get(queue._meta.label, _NOTHING)
            by_age = queue.delivery.expires_by_age
            override(
                queue,
                alias,
                lease_period=changed.get("lease_period", DECLARED),
                expiration=changed.get("expiration", DECLARED) if by_age else DECLARED,
            )


def _is_unsure(connection: Any) -> bool:
    """Whether an override that this connection reads may be rolled back."""
    if connection.in_atomic_block:
        return _SET_HERE in connection.__dict__
    connection.__dict__.pop(_SET_HERE, None)  # it was rolled back
    return False


def _read(alias: str) -> dict[str, Overrides]:
    controls = apps.get_model("queueapp", "QueueControl")._default_manager.using(alias)
    rows = controls.values_list("queue", *SETTABLE)
    return {label: from_columns(values) for label, *values in rows if any(value is not None for value in values)}


def _read_safely(alias: str) -> Mapping[str, Overrides] | None:
    """None: the query failed. The caller's work must not fail because of it."""
    if not router.allow_migrate_model(alias, apps.get_model("queueapp", "QueueControl")):
        return {}
    connection = connections[alias]
    if connection.in_atomic_block and connection.needs_rollback:
        return None
    try:
        with transaction.atomic(using=alias) if connection.in_atomic_block else nullcontext():
            return _read(alias)
    except DatabaseError as error:
        log.info(
            "Overrides of the queues in %r cannot be read; the last known ones stay in effect: %s",
            alias,
            str(error).split("\n", 1)[0],
        )
        return None
