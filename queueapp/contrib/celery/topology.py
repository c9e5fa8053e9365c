"""The queues, exchanges and bindings that were declared at run time, in the database: every process sees the same ones.

What is declared does not belong to a transaction of the user's: kombu remembers in each process what it has declared, so a
rollback must not take it away. It is written beside an open transaction, by a thread with a connection of its own; as a rule
it is there already, and is only read.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

from django.db import IntegrityError, connections, transaction
from django.db.models import F, Q

from ...errors import InvalidMessage
from ...models import DelayedMessage, Now
from .models import MAX_KEY_LENGTH, MAX_NAME_LENGTH, Binding, BrokerQueue, DeclaredQueue, Exchange

_T = TypeVar("_T")

#: How long a queue that goes with its last consumer stays when that was killed.
AUTO_DELETE_MS = 60_000
#: Rows that one statement deletes.
BATCH = 3000


def beside(alias: str, work: Callable[[], _T]) -> _T:
    """Do something in a transaction of its own, whatever transaction this thread has open."""
    if not connections[alias].in_atomic_block:
        return work()
    result: list[_T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            result.append(work())
        except BaseException as error:
            failure.append(error)
        finally:
            connections[alias].close()

    thread = threading.Thread(target=run, name="queueapp-declare")
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return result[0]


def _refuse_long(what: str, name: str, most: int) -> None:
    if len(name) > most or "\0" in name:
        raise InvalidMessage(f"{what} {name!r} is not accepted: at most {most} characters.")


# -- exchanges ---------------------------------------------------------------------------------------------------------


def exchange_kind(alias: str, name: str) -> str | None:
    """How an exchange finds its queues; None: nobody has declared it."""
    return Exchange.objects.using(alias).filter(pk=name).values_list("kind", flat=True).first()


def declare_exchange(alias: str, name: str, kind: str) -> None:
    """Make an exchange, or change its kind."""
    _refuse_long("The exchange", name, MAX_NAME_LENGTH)
    if exchange_kind(alias, name) != kind:
        beside(alias, lambda: Exchange.objects.using(alias).update_or_create(name=name, defaults={"kind": kind}))


def delete_exchange(alias: str, name: str) -> None:
    """Forget an exchange and its bindings; the queues stay."""

    def work() -> None:
        Binding.objects.using(alias).filter(exchange=name).delete()
        Exchange.objects.using(alias).filter(pk=name).delete()

    beside(alias, work)


# -- queues ------------------------------------------------------------------------------------------------------------


class Declaration:
    """How a queue was declared."""

    __slots__ = ("arguments", "auto_delete", "durable", "name")

    def __init__(self, name: str, durable: bool, auto_delete: bool, arguments: Mapping[str, Any] | None) -> None:
        self.name = name
        self.durable = bool(durable)
        self.auto_delete = bool(auto_delete)
        self.arguments = dict(arguments or {})

    @property
    def ttl_ms(self) -> int | None:
        """How long a message may wait in it."""
        return _positive(self.arguments.get("x-message-ttl"))

    @property
    def expires_ms(self) -> int | None:
        """How long it stays when nobody uses it."""
        return _positive(self.arguments.get("x-expires")) or (AUTO_DELETE_MS if self.auto_delete else None)

    def columns(self) -> dict[str, Any]:
        return {
            "durable": self.durable,
            "auto_delete": self.auto_delete,
            "arguments": json.dumps(self.arguments, sort_keys=True, default=str),
            "message_ttl_ms": self.ttl_ms,
            "expires_ms": self.expires_ms,
        }


def _positive(value: Any) -> int | None:
    return max(1, int(value)) if isinstance(value, int | float) and not isinstance(value, bool) else None


def exists(alias: str, name: str) -> bool:
    """Whether a queue is declared and its time is not over."""
    return DeclaredQueue.objects.using(alias).filter(pk=name).filter(_alive()).exists()


def declare(alias: str, one: Declaration) -> None:
    """Make a queue, or note that it is in use."""
    _refuse_long("The queue", one.name, MAX_NAME_LENGTH)
    columns = one.columns()
    rows = DeclaredQueue.objects.using(alias)
    if one.expires_ms is None and rows.filter(pk=one.name, **columns, expires_at=None).exists():
        return
    ends = None if one.expires_ms is None else Now() + timedelta(milliseconds=one.expires_ms)

    def work() -> None:
        with transaction.atomic(using=alias):
            if rows.filter(pk=one.name).filter(~_alive()).exists():
                # Its name comes back, and nothing of what it had before.
                delete(alias, one.name)
            if not rows.filter(pk=one.name).update(**columns, expires_at=ends):
                try:
                    with transaction.atomic(using=alias):
                        rows.create(name=one.name, **columns, expires_at=ends)
                except IntegrityError:
                    rows.filter(pk=one.name).update(**columns, expires_at=ends)  # somebody was faster

    beside(alias, work)


def _alive() -> Q:
    return Q(expires_at=None) | Q(expires_at__gt=Now())


def refresh(alias: str, declarations: Iterable[Declaration]) -> set[str]:
    """Note that these queues are in use; the names of those that are gone."""
    missing = set()
    by_time: dict[int, list[str]] = {}
    for one in declarations:
        if one.expires_ms is not None:
            by_time.setdefault(one.expires_ms, []).append(one.name)
    for ms, names in by_time.items():
        rows = DeclaredQueue.objects.using(alias).filter(pk__in=names)
        if rows.update(expires_at=Now() + timedelta(milliseconds=ms)) < len(names):
            missing |= {*names} - {*rows.values_list("pk", flat=True)}
    return missing


def delete(alias: str, name: str) -> int:
    """Forget a queue, its bindings and its messages, also the delayed ones; returns how many messages."""
    with transaction.atomic(using=alias):
        # First the bindings: from now on nothing comes in.
        Binding.objects.using(alias).filter(queue=name).delete()
        DeclaredQueue.objects.using(alias).filter(pk=name).delete()
        count = BrokerQueue.objects.using(alias).filter(recipient=name).delete()[0]
        return count + delayed(alias, name).delete()[0]


def delayed(alias: str, name: str) -> Any:
    """What is delayed for a queue."""
    return DelayedMessage.objects.using(alias).filter(destination=BrokerQueue._meta.label, recipient=name)


def reap(alias: str) -> list[str]:
    """Delete the queues that nobody has used for as long as they stay; their names. The row is locked, and asked again."""
    gone = []
    old = DeclaredQueue.objects.using(alias).filter(expires_at__lt=Now())
    for name in list(old.values_list("pk", flat=True)[:BATCH]):
        with transaction.atomic(using=alias):
            if old.select_for_update(skip_locked=True).filter(pk=name).exists():
                delete(alias, name)
                gone.append(name)
    return gone


# -- what waits --------------------------------------------------------------------------------------------------------


def ready(alias: str, name: str) -> Any:
    """What a worker could have of a queue."""
    free = Q(lease_expires=None) | Q(lease_expires__lt=Now())
    waiting = Q(expires=None) | Q(expires__gt=Now())
    return BrokerQueue.objects.using(alias).filter(free & waiting, recipient=name).order_by()


def size(alias: str, name: str, most: int) -> int:
    """How many messages wait in a queue, counting no further than ``most``."""
    from ...sql import nonblocking

    return int(nonblocking(ready(alias, name))[:most].count())


def purge(alias: str, name: str) -> int:
    """Delete what waits in a queue, in batches, and what is delayed for it; returns how many. What a worker has stays."""
    total = 0
    while True:
        with transaction.atomic(using=alias):
            keys = list(ready(alias, name).select_for_update(skip_locked=True).values_list("pk", flat=True)[:BATCH])
            total += BrokerQueue.objects.using(alias).filter(pk__in=keys).delete()[0] if keys else 0
        if len(keys) < BATCH:
            return total + int(delayed(alias, name).delete()[0])


# -- bindings ----------------------------------------------------------------------------------------------------------


def bind(alias: str, exchange: str, routing_key: str, queue: str) -> None:
    """Let what is published to an exchange by this key come into a queue."""
    _refuse_long("The routing key", routing_key, MAX_KEY_LENGTH)
    one: dict[str, Any] = {"exchange": exchange, "routing_key": routing_key, "queue": queue}
    if not Binding.objects.using(alias).filter(**one).exists():
        beside(alias, lambda: Binding.objects.using(alias).get_or_create(**one))


def unbind(alias: str, exchange: str, routing_key: str, queue: str) -> None:
    """Take a binding away."""
    rows = Binding.objects.using(alias).filter(exchange=exchange, routing_key=routing_key, queue=queue)
    beside(alias, rows.delete)


def bindings(alias: str, exchange: str | None = None) -> list[tuple[str, str, str]]:
    """(exchange, routing key, queue) of all, or of those of one exchange, whose queue's time is not over."""
    rows = Binding.objects.using(alias).filter(
        queue__in=DeclaredQueue.objects.using(alias).filter(_alive()).values("pk")
    )
    if exchange is not None:
        rows = rows.filter(exchange=exchange)
    return list(rows.order_by(F("number")).values_list("exchange", "routing_key", "queue"))


def bindings_of(alias: str, queue: str) -> list[tuple[str, str]]:
    """(exchange, routing key) by which a queue is bound."""
    return list(Binding.objects.using(alias).filter(queue=queue).values_list("exchange", "routing_key"))
