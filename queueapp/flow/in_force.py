"""The options of a queue that an operator can set without a deploy, and the value that is in force now.

    operating.control --row of QueueControl--> heartbeat of each worker (``told``), every second
                                           --> other processes: one read per database, when what they know is older than AGE

A worker's claims and whoever calls ``receive()`` ask here; senders do not. One read answers for all queues of a database, so
a queue of which nothing was ever set costs nothing of its own.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from contextlib import nullcontext
from datetime import timedelta
from time import monotonic
from typing import Any

from django.db import DatabaseError, connections, router, transaction

from .. import overrides, registry
from ..errors import InvalidOption
from ..models import QueueControl
from ..models.delivery import OPTIONS, Semantics
from ..options import Option

log = logging.getLogger("queueapp")

#: What can be set: columns of ``QueueControl`` that are called as the options of ``class Delivery``.
SETTABLE = ("max_backlog", "target_queue_depth", "lease_period", "expiration")
#: Seconds for which a process that has no heartbeat believes what it read.
AGE = 5.0
#: The same for what a heartbeat told, which tells it again each second; a process that has none any more gives up work itself.
AGE_OF_TOLD = 60.0

#: On a connection whose open transaction has set something.
_SET_HERE = "_queueapp_set_here"

#: What is set for one queue; options that are not set are not in it.
Overrides = Mapping[str, Any]
_NOTHING: Overrides = {}
_known: dict[str, tuple[float, Mapping[str, Overrides]]] = {}
#: When what is known was asked for, or something was set here: what was asked for before that says nothing any more.
_asked: dict[str, float] = {}
_learning = threading.Lock()


def _forked() -> None:
    global _learning
    _learning = threading.Lock()  # somebody may have held it who is not here


os.register_at_fork(after_in_child=_forked)


def value(queue: Any, name: str, alias: str) -> Any:
    """The value in force of one of ``SETTABLE``: what was set, else what is declared; None for an option that this version has
    not. May read the database (``AGE``), in the caller's transaction if there is one."""
    found = _overrides(alias).get(queue._meta.label, _NOTHING).get(name)
    return getattr(queue.delivery, name, None) if found is None else found


def matters(queue: Any) -> bool:
    """Whether anything can be set for a queue that who receives from it has to know: where there are leases, how long they last."""
    delivery = queue.delivery
    leases = delivery.semantics is Semantics.AT_LEAST_ONCE or delivery.keeps_sent
    return leases or delivery.expires_by_age or delivery.max_backlog is not None


def told(alias: str, found: Mapping[str, Overrides], asked: float | None = None) -> None:
    """A heartbeat has read what is set in a database, by label: nobody else of this process has to. ``asked``: the ``monotonic``
    time when it began to; now, if not given."""
    _learn(alias, found, AGE_OF_TOLD, monotonic() if asked is None else asked)


def refresh(alias: str) -> None:
    """See to it that ``overrides`` knows what is in force. May read the database, as ``value``."""
    _overrides(alias)


def forget(alias: str | None = None) -> None:
    """Read anew at the next question: something was just set here."""
    with _learning:
        for one in connections if alias is None else (alias,):
            _known.pop(one, None)
            _asked[one] = monotonic()


def set_here(alias: str) -> None:
    """Something was just set by this connection. Until its transaction has ended what it reads is true of itself alone."""
    forget(alias)
    connection = connections[alias]

    def committed() -> None:
        connection.__dict__.pop(_SET_HERE, None)
        forget(alias)  # others of this process may have read meanwhile what is no longer so

    if connection.in_atomic_block:
        connection.__dict__[_SET_HERE] = True
        transaction.on_commit(committed, using=alias)


def _is_unsure(connection: Any) -> bool:
    """Whether what the connection reads may be rolled back."""
    if connection.in_atomic_block:
        return _SET_HERE in connection.__dict__
    connection.__dict__.pop(_SET_HERE, None)  # it was
    return False


def read(alias: str) -> dict[str, Overrides]:
    """What is set in a database, by label."""
    rows = QueueControl.objects.using(alias).values_list("queue", *SETTABLE)
    return {label: overrides_of(values) for label, *values in rows if any(one is not None for one in values)}


def read_anew(alias: str) -> Mapping[str, Overrides]:
    """The same, which the statements of this process go by from now on."""
    asked, found = monotonic(), read(alias)
    if _is_unsure(connections[alias]):
        return found
    known = _known.get(alias)
    if known is None or known[0] < monotonic() + AGE:  # else a heartbeat tells it
        _learn(alias, found, AGE, asked)
    return found


def overrides_of(values: list[Any]) -> Overrides:
    """The values of ``SETTABLE``, as columns, without those that are not set."""
    return {name: one for name, one in zip(SETTABLE, values, strict=True) if one is not None}


def option_of(name: str) -> Option:
    """The declaration of an option that can be set. Raises InvalidOption."""
    if name in SETTABLE:
        for option in OPTIONS:
            if option.name == name:
                return option
    raise InvalidOption("option", name, "one of " + ", ".join(settable()))


def settable() -> list[str]:
    """Those of ``SETTABLE`` that this version has as an option."""
    declared = {option.name for option in OPTIONS}
    return [name for name in SETTABLE if name in declared]


def check(queue: Any, name: str, given: Any) -> Any:
    """The value as it is stored; None: as declared again. Raises InvalidOption, for a value out of the option's bounds and for a
    queue that is not made for it."""
    option = option_of(name)
    if given is None:
        return None
    if name == "max_backlog" and queue.delivery.max_backlog is None:
        raise InvalidOption(
            f"{queue._meta.label}: max_backlog", given,
            "None: the queue declares none in its class Delivery, and so keeps no record of its claims",
        )  # fmt: skip
    if name == "target_queue_depth" and getattr(queue.delivery, name, None) is None:
        raise InvalidOption(
            f"{queue._meta.label}: {name}", given, "None: the queue declares none in its class Delivery"
        )
    if name == "expiration" and not queue.delivery.expires_by_age:
        raise InvalidOption(
            f"{queue._meta.label}: {name}", given,
            "None: the queue declares none in its class Delivery, and so has no index to find by age",
        )  # fmt: skip
    read: Any = option.read(given, f"{queue._meta.label}: ")
    return read


def milliseconds(period: timedelta) -> int:
    """A duration as the statements take it."""
    return int(period / timedelta(milliseconds=1))


def _overrides(alias: str) -> Mapping[str, Overrides]:
    asked, known = monotonic(), _known.get(alias)
    unsure = _is_unsure(connections[alias])
    if known is not None and monotonic() < known[0] and not unsure:
        return known[1]
    found = _read_safely(alias)
    if unsure and found is not None:
        return found
    if found is None:  # as before, for a while
        found = known[1] if known is not None else {}
    _learn(alias, found, AGE, asked)
    return found


def _learn(alias: str, found: Mapping[str, Overrides], age: float, asked: float) -> None:
    """Believe for ``age`` seconds what was asked for at a time. Threads read beside each other, and one that was held up comes
    with what was so before somebody set something: seen on a busy machine, where a heartbeat took back for a second what had
    just been set."""
    with _learning:
        if asked < _asked.get(alias, asked):
            return
        _asked[alias] = asked
        _known[alias] = monotonic() + age, found
        _pass_on(alias, found)


def _pass_on(alias: str, found: Mapping[str, Overrides]) -> None:
    """To where statements and strategies look, each time: what is set is in force from now on, and what is not set any more is
    not."""
    for queue in registry.queues:
        of_it = found.get(queue._meta.label, _NOTHING)
        by_age = queue.delivery.expires_by_age
        overrides.override(
            queue,
            alias,
            lease_period=of_it.get("lease_period", overrides.DECLARED),
            expiration=of_it.get("expiration", overrides.DECLARED) if by_age else overrides.DECLARED,
        )


def _read_safely(alias: str) -> Mapping[str, Overrides] | None:
    """None: it cannot be read now. What the caller is about to do is not to fail for it."""
    if not router.allow_migrate_model(alias, QueueControl):
        return {}
    connection = connections[alias]
    if connection.in_atomic_block and connection.needs_rollback:
        return None
    try:
        with transaction.atomic(using=alias) if connection.in_atomic_block else nullcontext():
            return read(alias)
    except DatabaseError as error:
        log.info("What is set for the queues of %r cannot be read: %s", alias, str(error).split("\n", 1)[0])
        return None
