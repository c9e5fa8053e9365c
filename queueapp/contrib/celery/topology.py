"""The declared queues, exchanges and bindings. They are rows in the database, so every process sees the same topology.

A declaration is not part of the caller's transaction: kombu caches in each process what it has declared, so a rollback
must not undo it. Inside a transaction it is written by a thread with its own connection. Usually the row exists already
and is only read.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

from django.db import IntegrityError, transaction
from django.db.models import F, Q

from ...errors import InvalidMessage
from ...models import DelayedMessage, Now
from ...options import is_storable
from ...sending.isolation import outside_transaction
from . import ended_tasks
from .models import MAX_KEY_LENGTH, MAX_NAME_LENGTH, Binding, BrokerQueue, DeclaredQueue, Exchange

_T = TypeVar("_T")

#: Milliseconds after which an auto-delete queue expires when its last consumer was killed.
AUTO_DELETE_MS = 60_000
#: Maximum number of rows that one statement deletes.
BATCH = 3000


def check_name(what: str, name: str, max_length: int) -> None:
    """Raise InvalidMessage for a name that no database stores."""
    if len(name) > max_length:
        raise InvalidMessage(f"The {what} {name!r:.100} is not accepted: at most {max_length} characters.")
    if not is_storable(name, max_length):
        raise InvalidMessage(
            f"The {what} {name!r:.100} is not accepted: it has a NUL character or half of a surrogate pair."
        )


# -- exchanges ---------------------------------------------------------------------------------------------------------


def exchange_kind(alias: str, name: str) -> str | None:
    """The kind of an exchange; None: it is not declared."""
    check_name("exchange", name, MAX_NAME_LENGTH)
    return Exchange.objects.using(alias).filter(pk=name).values_list("kind", flat=True).first()


def declare_exchange(alias: str, name: str, kind: str) -> None:
    """Declare an exchange, or change its kind."""
    check_name("exchange", name, MAX_NAME_LENGTH)
    if exchange_kind(alias, name) != kind:
        outside_transaction(
            alias, lambda: Exchange.objects.using(alias).update_or_create(name=name, defaults={"kind": kind})
        )


def delete_exchange(alias: str, name: str) -> None:
    """Delete an exchange and its bindings; the queues stay."""
    check_name("exchange", name, MAX_NAME_LENGTH)

    def work() -> None:
        Binding.objects.using(alias).filter(exchange=name).delete()
        Exchange.objects.using(alias).filter(pk=name).delete()

    outside_transaction(alias, work)


# -- queues ------------------------------------------------------------------------------------------------------------


class Declaration:
    """The declaration of a queue."""

    __slots__ = ("arguments", "auto_delete", "durable", "name")

    def __init__(self, name: str, durable: bool, auto_delete: bool, arguments: Mapping[str, Any] | None) -> None:
        self.name = name
        self.durable = bool(durable)
        self.auto_delete = bool(auto_delete)
        self.arguments = dict(arguments or {})

    @property
    def ttl_ms(self) -> int | None:
        """Milliseconds that a message may wait in the queue."""
        return _positive(self.arguments.get("x-message-ttl"))

    @property
    def expires_ms(self) -> int | None:
        """Milliseconds after which the unused queue is deleted."""
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
    """Whether a queue is declared and not expired."""
    check_name("queue", name, MAX_NAME_LENGTH)
    return DeclaredQueue.objects.using(alias).filter(pk=name).filter(_alive()).exists()


def declare(alias: str, declaration: Declaration) -> None:
    """Declare a queue, or extend its expiry."""
    check_name("queue", declaration.name, MAX_NAME_LENGTH)
    name, columns = declaration.name, declaration.columns()
    rows = DeclaredQueue.objects.using(alias)
    if declaration.expires_ms is None and rows.filter(pk=name, **columns, expires_at=None).exists():
        return
    expires = None if declaration.expires_ms is None else Now() + timedelta(milliseconds=declaration.expires_ms)

    def work() -> None:
        with transaction.atomic(using=alias):
            if rows.filter(pk=name).filter(~_alive()).exists():
                # The name is used again, without the old messages and bindings.
                delete(alias, name)
            if not rows.filter(pk=name).update(**columns, expires_at=expires):
                try:
                    with transaction.atomic(using=alias):
                        rows.create(name=name, **columns, expires_at=expires)
                except IntegrityError:
                    rows.filter(pk=name).update(**columns, expires_at=expires)  # another process declared it first

    outside_transaction(alias, work)


def _alive() -> Q:
    return Q(expires_at=None) | Q(expires_at__gt=Now())


def extend(alias: str, declarations: Iterable[Declaration]) -> set[str]:
    """Extend the expiry of these queues; returns the names of those that do not exist any more."""
    missing = set()
    by_time: dict[int, list[str]] = {}
    for declaration in declarations:
        if declaration.expires_ms is not None:
            by_time.setdefault(declaration.expires_ms, []).append(declaration.name)
    for ms, names in by_time.items():
        rows = DeclaredQueue.objects.using(alias).filter(pk__in=names)
        if rows.update(expires_at=Now() + timedelta(milliseconds=ms)) < len(names):
            missing |= {*names} - {*rows.values_list("pk", flat=True)}
    return missing


def delete(alias: str, name: str) -> int:
    """Delete a queue, its bindings and its messages, delayed ones included; returns the number of messages."""
    check_name("queue", name, MAX_NAME_LENGTH)
    with transaction.atomic(using=alias):
        # Bindings first: from then on no message is routed into it.
        Binding.objects.using(alias).filter(queue=name).delete()
        DeclaredQueue.objects.using(alias).filter(pk=name).delete()
        # The tasks of messages in flight are running; their workers store the results.
        in_flight = Q(recipient=name, lease_expires__gte=Now())
        rows = BrokerQueue.objects.using(alias)
        count = _discard(alias, rows.filter(recipient=name).exclude(in_flight), ended_tasks.QUEUE_DELETED)
        count += rows.filter(recipient=name).delete()[0]
        return count + _discard(alias, delayed(alias, name), ended_tasks.QUEUE_DELETED)


def _discard(alias: str, rows: Any, reason: str) -> int:
    """Delete messages in batches, in the caller's transaction, and revoke their tasks; returns the number."""
    total = 0
    while True:
        batch = _discard_batch(alias, rows, reason)
        total += batch
        if batch < BATCH:
            return total


def _discard_batch(alias: str, rows: Any, reason: str) -> int:
    found = list(rows.select_for_update(skip_locked=True).order_by().values_list("pk", "headers", "body")[:BATCH])
    if found and "celery" in sys.modules:
        ended_tasks.revoke(alias, ((headers, body) for _, headers, body in found), reason)
    count: int = (
        rows.model._base_manager.using(alias).filter(pk__in=[row[0] for row in found]).delete()[0] if found else 0
    )
    return count


def delayed(alias: str, name: str) -> Any:
    """The delayed messages of a queue."""
    return DelayedMessage.objects.using(alias).filter(destination=BrokerQueue._meta.label, recipient=name)


def delete_expired(alias: str) -> list[str]:
    """Delete the expired queues; returns their names. Each row is checked again under its lock."""
    names = []
    old = DeclaredQueue.objects.using(alias).filter(expires_at__lt=Now())
    for name in list(old.values_list("pk", flat=True)[:BATCH]):
        with transaction.atomic(using=alias):
            if old.select_for_update(skip_locked=True).filter(pk=name).exists():
                delete(alias, name)
                names.append(name)
    return names


# -- messages ----------------------------------------------------------------------------------------------------------


def ready_messages(alias: str, name: str) -> Any:
    """The messages of a queue that a worker can claim."""
    check_name("queue", name, MAX_NAME_LENGTH)
    free = Q(lease_expires=None) | Q(lease_expires__lt=Now())
    waiting = Q(expires=None) | Q(expires__gt=Now())
    return BrokerQueue.objects.using(alias).filter(free & waiting, recipient=name).order_by()


def size(alias: str, name: str, limit: int) -> int:
    """Number of ready messages of a queue, at most ``limit``."""
    from ...sql import nonblocking

    return int(nonblocking(ready_messages(alias, name))[:limit].count())


def purge(alias: str, name: str) -> int:
    """Delete the ready and the delayed messages of a queue, in batches; returns the number. Messages in flight stay."""
    total = 0
    while True:
        with transaction.atomic(using=alias):
            count = _discard_batch(alias, ready_messages(alias, name), ended_tasks.PURGED)
        total += count
        if count < BATCH:
            break
    with transaction.atomic(using=alias):
        return total + _discard(alias, delayed(alias, name), ended_tasks.PURGED)


# -- bindings ----------------------------------------------------------------------------------------------------------


def check_binding(exchange: str, routing_key: str, queue: str = "") -> None:
    """Raise InvalidMessage for names that no database stores."""
    check_name("exchange", exchange, MAX_NAME_LENGTH)
    check_name("routing key", routing_key, MAX_KEY_LENGTH)
    check_name("queue", queue, MAX_NAME_LENGTH)


def bind(alias: str, exchange: str, routing_key: str, queue: str) -> None:
    """Route messages with this key from an exchange into a queue."""
    check_binding(exchange, routing_key, queue)
    columns: dict[str, Any] = {"exchange": exchange, "routing_key": routing_key, "queue": queue}
    if not Binding.objects.using(alias).filter(**columns).exists():
        outside_transaction(alias, lambda: Binding.objects.using(alias).get_or_create(**columns))


def unbind(alias: str, exchange: str, routing_key: str, queue: str) -> None:
    """Delete a binding."""
    check_binding(exchange, routing_key, queue)
    rows = Binding.objects.using(alias).filter(exchange=exchange, routing_key=routing_key, queue=queue)
    outside_transaction(alias, rows.delete)


def bindings(alias: str, exchange: str | None = None) -> list[tuple[str, str, str]]:
    """(exchange, routing key, queue) of all bindings, or those of one exchange, whose queue is not expired."""
    rows = Binding.objects.using(alias).filter(
        queue__in=DeclaredQueue.objects.using(alias).filter(_alive()).values("pk")
    )
    if exchange is not None:
        rows = rows.filter(exchange=exchange)
    return list(rows.order_by(F("number")).values_list("exchange", "routing_key", "queue"))


def bindings_of(alias: str, queue: str) -> list[tuple[str, str]]:
    """(exchange, routing key) of the bindings of a queue."""
    return list(Binding.objects.using(alias).filter(queue=queue).values_list("exchange", "routing_key"))
