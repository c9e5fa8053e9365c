"""What happens after a failed attempt: retry now, retry later, poison or discard (DESIGN §6, spec/004).

The handler's transaction is rolled back first; ``fail`` then opens a clean one, locks the message, counts the attempt,
asks the policy and carries its verdict out. A move to another table is that same transaction, so a message is never in
two places and never in none. Counts and reasons are on the row: they survive the process, and do not multiply with the
number of workers.
"""

from __future__ import annotations

import hashlib
import os
import random
import socket
import threading
import traceback
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import msgspec
from django.db import Error, connections, transaction

from . import __version__, messages, signals, wakeups
from .conf import settings
from .consumers import Registration
from .errors import UndecodableMessage
from .models import DelayedMessage, Now, PoisonMessage
from .sql import queue_sql
from .sql.base import Row

#: Longest exception message and traceback kept, in characters (NServiceBus cuts at the same place).
MAX_TEXT = 16_384
#: Failed attempts kept with a message: the first ones tell most, the last ones are current.
MAX_FAILURES = 20


# -- verdicts ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RetryNow:
    """Put the message back in its place; it is received again at once."""


@dataclass(frozen=True, slots=True)
class RetryLater:
    """Move the message to the delayed store; it comes back to its queue after ``delay``."""

    delay: timedelta


@dataclass(frozen=True, slots=True)
class Poison:
    """Move the message to the poison table, with this reason in one line."""

    reason: str


@dataclass(frozen=True, slots=True)
class Discard:
    """Drop the message for good; the reason is logged."""

    reason: str = ""


Verdict = RetryNow | RetryLater | Poison | Discard


@dataclass(slots=True)
class Failure:
    """One failed attempt as a policy sees it: ``policy(failure) -> verdict``. The row is as it is stored, so header
    changes of the failed handler are not here."""

    queue: Any
    consumer: Registration | None
    row: Row
    exception: BaseException
    attempt: int
    items: dict[str, Any] = field(default_factory=dict)

    @property
    def headers(self) -> dict[str, str]:
        """The stored headers; empty when they do not parse."""
        try:
            return messages.decode_headers(self.row.headers)
        except UndecodableMessage:
            return {}

    def option(self, name: str) -> Any:
        """An option of the consumer, or else of the project (``attempts`` -> ``QUEUEAPP.ATTEMPTS``)."""
        value = self.consumer.options[name] if self.consumer is not None else None
        return value if value is not None else getattr(settings, name.upper())


def default_policy(failure: Failure) -> Verdict:
    """Immediate retries, then delayed ones with increase and jitter, then poison (NServiceBus' order of decisions)."""
    if isinstance(failure.exception, UndecodableMessage):
        return Poison("undecodable: " + _one_line(failure.exception))
    unrecoverable = failure.consumer.options["unrecoverable"] if failure.consumer else ()
    if unrecoverable and isinstance(failure.exception, unrecoverable):
        return Poison("unrecoverable: " + _one_line(failure.exception))
    attempts = failure.option("attempts")
    limit = failure.queue.delivery.max_deliveries
    if failure.attempt >= attempts or (limit and failure.attempt >= limit):
        return Poison(f"failed {failure.attempt} of {attempts} attempts: {_one_line(failure.exception)}")
    immediate = failure.option("immediate_retries")
    if failure.attempt <= immediate:
        return RetryNow()
    wait = failure.option("retry_delay") + failure.option("retry_delay_increase") * (failure.attempt - immediate - 1)
    wait += wait * (failure.option("retry_jitter") * random.random())
    return RetryLater(wait) if wait else RetryNow()


class StoreFailed(Error):
    """The delayed store could not take a message; the store's circuit breaker counts it (spec/002)."""


# -- carrying it out -----------------------------------------------------------------------------------------------


def fail(
    queue: Any,
    alias: str,
    seq: int,
    exception: BaseException,
    *,
    consumer: Registration | None,
    token: uuid.UUID | None,
    wait: timedelta = timedelta(seconds=60),
    items: dict[str, Any] | None = None,
) -> Verdict | None:
    """Count a failed attempt of a message that is still in its table and carry out the verdict, in a clean transaction.

    ``token``: the lease it is held under; None for a TRANSACTIONAL receive that was rolled back, whose delivery is
    counted here. Returns None when the message is gone or leased to somebody else: then nothing was changed. Raises an
    error of kind LOCKED when another transaction holds the row longer than ``wait``.
    """
    connection = connections[alias]
    sql = queue_sql(queue, connection)
    with transaction.atomic(using=alias):
        row = sql.lock(connection, seq, token, int(wait.total_seconds() * 1000))
        if row is None:
            return None
        decided = decide_locked(queue, alias, row, exception, consumer=consumer, token=token, items=items)
    decided.tell()
    return decided.verdict


@dataclass(slots=True)
class Decided:
    """A verdict that was carried out; ``tell`` the world once that is committed."""

    failure: Failure
    verdict: Verdict
    connection: Any

    def tell(self) -> None:
        """Send wake-ups and signals, and log."""
        _tell(self.failure, self.verdict, self.connection)


def decide_locked(
    queue: Any,
    alias: str,
    row: Row,
    exception: BaseException,
    *,
    consumer: Registration | None,
    token: uuid.UUID | None,
    items: dict[str, Any] | None = None,
) -> Decided:
    """The part of ``fail`` that runs in the clean transaction, for a caller that has the row locked in it already."""
    connection = connections[alias]
    sql = queue_sql(queue, connection)
    has_column = sql.table.has("deliveries")
    if not has_column:
        row = row._replace(deliveries=messages.counted_attempts(row.headers))
    counted = row if token is not None else row._replace(deliveries=row.deliveries + 1)
    failure = Failure(queue, consumer, counted, exception, max(1, counted.deliveries), items or {})
    verdict = _ask(failure, alias)
    if not has_column and isinstance(verdict, RetryNow | RetryLater):
        # A foreign table has no column for it, so the count travels in the headers.
        counted = row._replace(headers=messages.count_attempts(row.headers, counted.deliveries))
        failure.row = counted
    elif not has_column and row.deliveries:
        failure.row = counted._replace(headers=messages.count_attempts(row.headers, 0))
    failures = _append(row.failures, failure, verdict)
    if isinstance(verdict, RetryNow):
        ended = sql.put_back(
            connection,
            row.seq,
            deliveries=counted.deliveries,
            cancels=row.cancels,
            failures=failures,
            token=token,
            headers=None if has_column else counted.headers,
        )
    else:
        ended = sql.remove(connection, [row.seq])
        _keep(failure, verdict, failures, alias)
    if ended != 1:
        raise RuntimeError(f"Message {row.seq} of {queue._meta.label} vanished under its lock.")
    return Decided(failure, verdict, connection)


def fail_taken(
    queue: Any,
    alias: str,
    row: Row,
    exception: BaseException,
    *,
    consumer: Registration | None,
    items: dict[str, Any] | None = None,
    verdict: Verdict | None = None,
) -> Verdict:
    """The same for an AT_MOST_ONCE message, which left its table before its handler ran: it is kept as poison, and
    never retried by itself, because that would make it at-least-once. With a ``verdict`` the policy is not asked."""
    counted = row._replace(deliveries=row.deliveries + 1)
    failure = Failure(queue, consumer, counted, exception, counted.deliveries, items or {})
    with transaction.atomic(using=alias):
        verdict = verdict or _ask(failure, alias)
        if isinstance(verdict, RetryNow | RetryLater):
            verdict = Poison("at-most-once, not retried: " + _one_line(exception))
        _keep(failure, verdict, _append(row.failures, failure, verdict), alias)
    _tell(failure, verdict, connections[alias])
    return verdict


def _ask(failure: Failure, alias: str) -> Verdict:
    policy: Callable[[Failure], Verdict] | None = failure.consumer.options["policy"] if failure.consumer else None
    if policy is None:
        return default_policy(failure)
    try:
        # What a policy writes or sends is kept with its verdict, and undone alone when it raises.
        with transaction.atomic(using=alias):
            verdict = policy(failure)
    except Exception as error:
        # A policy that fails must not lose the message nor stop the queue: the default one decides.
        signals.log.exception("The recoverability policy of %r failed; the default decides.", failure.consumer)
        failure.items["policy_error"] = repr(error)
        return default_policy(failure)
    if not isinstance(verdict, RetryNow | RetryLater | Poison | Discard):
        signals.log.error(
            "The recoverability policy of %r returned %r; the default decides.", failure.consumer, verdict
        )
        return default_policy(failure)
    return verdict


def _keep(failure: Failure, verdict: Verdict, failures: str, alias: str) -> None:
    row = failure.row
    carried: dict[str, Any] = {
        "message_id": row.id,
        "headers": row.headers,
        "body": row.body,
        "expires": row.expires,
        "recipient": row.recipient,
        "priority": row.priority,
        "correlation_id": row.correlation_id,
        "reply_to_address": row.reply_to_address,
        "enqueued_at": row.enqueued_at,
        "deliveries": row.deliveries,
        "cancels": row.cancels,
        "failures": failures,
    }
    if isinstance(verdict, RetryLater):
        try:
            DelayedMessage.objects.using(alias).create(
                destination=failure.queue._meta.label, due=Now() + verdict.delay, **carried
            )
        except Error as error:
            raise StoreFailed(str(error)) from error
    elif isinstance(verdict, Poison):
        PoisonMessage.objects.using(alias).create(
            queue=failure.queue._meta.label,
            consumer=failure.consumer.name if failure.consumer else "",
            reason=verdict.reason[:500],
            attempts=failure.attempt,
            first_failed_at=_first_failed(failures),
            **describe(failure.exception),
            **_where(),
            message_type=_type_of(row),
            edit_of=messages.edit_of(row.headers),
            **carried,
        )


def _tell(failure: Failure, verdict: Verdict, connection: Any) -> None:
    if isinstance(verdict, RetryLater):
        wakeups.delayed(connection)
        signals.send(signals.delayed_retry, failure, verdict)
    elif isinstance(verdict, RetryNow):
        wakeups.sent(failure.queue, connection)
        signals.send(signals.retry, failure, verdict)
    elif isinstance(verdict, Poison):
        signals.send(signals.poisoned, failure, verdict)
    else:
        signals.send(signals.discarded, failure, verdict)


# -- what is written down ------------------------------------------------------------------------------------------


def describe(exception: BaseException) -> dict[str, str]:
    """The columns of the poison table that tell of an exception: bounded, and without NULs, which PostgreSQL refuses."""
    frames = traceback.extract_tb(exception.__traceback__)
    kind = f"{type(exception).__module__}.{type(exception).__qualname__}".removeprefix("builtins.")
    # The place a developer would name: where it was raised, not by which worker loop it was called.
    place = f"{frames[-1].filename}:{frames[-1].name}" if frames else ""
    text = "".join(traceback.format_exception(exception))
    return {
        "exception_type": kind[:255],
        "exception_message": _clean(_words_of(exception), MAX_TEXT),
        # The end of a traceback says what happened; a recursion's middle says nothing.
        "traceback": _clean(
            text if len(text) <= MAX_TEXT else text[:2000] + "\n…\n" + text[-(MAX_TEXT - 2010) :], MAX_TEXT
        ),
        "group_key": hashlib.sha256(f"{kind}@{place}".encode()).hexdigest()[:32],
    }


def _where() -> dict[str, str]:
    return {
        "host": socket.gethostname()[:255],
        "process": f"{os.getpid()}:{threading.current_thread().name}"[:64],
        "worker_version": os.environ.get("QUEUEAPP_WORKER_VERSION", __version__)[:64],
    }


def _clean(text: str, limit: int) -> str:
    # Lone surrogates come from undecodable file names in messages of OSError; no database takes them.
    return text.replace("\0", "\ufffd").encode("utf-8", "replace").decode()[:limit]


def _one_line(exception: BaseException) -> str:
    return _clean(f"{type(exception).__name__}: {_words_of(exception)}".split("\n", 1)[0], 400)


def _words_of(exception: BaseException) -> str:
    try:
        return str(exception)
    except Exception as error:
        # The failure has to be kept, whatever its class makes of being shown.
        return f"(its __str__ raised {type(error).__name__})"


def _type_of(row: Row) -> str:
    try:
        return messages.read_head(row.headers)[0][:255]
    except UndecodableMessage:
        return ""


def read_failures(failures: str | None) -> list[dict[str, Any]]:
    """The history of failed attempts, oldest first; [] when there is none or it does not parse."""
    try:
        history = msgspec.json.decode(failures or "[]")
    except msgspec.DecodeError:
        return []
    return history if isinstance(history, list) else []


def _append(failures: str | None, failure: Failure, verdict: Verdict) -> str:
    history = read_failures(failures)
    if len(history) >= MAX_FAILURES:
        del history[MAX_FAILURES // 2]
    alias_now = failure.items.get("at") or _utc_now()
    history.append(
        {
            "at": alias_now,
            "attempt": failure.attempt,
            "exception": _one_line(failure.exception),
            "verdict": type(verdict).__name__,
            **_where(),
        }
    )
    return msgspec.json.encode(history).decode()


def _utc_now() -> str:
    from django.utils import timezone

    # For people to read; nothing is ever compared with it, so a host's clock will do.
    return timezone.now().isoformat()


def _first_failed(failures: str) -> str | None:
    history = read_failures(failures)
    return history[0]["at"] if history else None
