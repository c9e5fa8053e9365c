"""Moves a task that has failed for good to poison, with its traceback: out of retries, over its time limit, or its
process died.

Celery acks the message of such a task. Here it is moved to the poison table instead: in one transaction if it is still
leased (``acks_late``), else as a new record made from the received message. Requeued from the poison page, the task
runs again with the retries that it had left. ``broker_transport_options["keep_failed"] = False``, or ``keep_failed =
False`` on a task, turns this off. The worker's main process does it, because it learns of every end, also of the death
of a child.

A malformed task message, which names a task and has headers or a body that Celery does not write, becomes poison as
well. Celery does not validate it and fails outside of its error handling: the worker exits, the message is delivered
again and ends the next worker, or the task is never started and never acked. Here it is refused on receipt, with the
reason.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from math import isfinite
from pickle import PicklingError
from typing import Any

from billiard.einfo import ExceptionWithTraceback
from celery import bootsteps
from celery.app.task import Task
from celery.exceptions import (
    Ignore,
    InvalidTaskError,
    Reject,
    Retry,
    TaskRevokedError,
    TimeLimitExceeded,
    WorkerLostError,
)
from celery.worker import state
from celery.worker.consumer.tasks import Tasks
from celery.worker.request import Request as CeleryRequest
from celery.worker.request import Terminated
from django.db import Error, transaction

from ...failures.history import MAX_TEXT, clean, describe
from ...messages.escaping import in_one_line
from . import ended_tasks, poison, retrying
from .in_flight import Delivered

log = logging.getLogger("queueapp")

#: Errors that a value of the wrong shape causes. Errors of the database, the network or the disk are not among them.
SHAPE_ERRORS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)

_SIMPLE = (str, int, float, type(None))
_MAX_REASON = 300


def task_error(headers: Mapping[str, Any], payload: Any) -> str:
    """Why a task cannot run; '' if it can. ``payload``: (args, kwargs, embed)."""
    args, kwargs, embed = payload
    if not isinstance(args, list | tuple):
        return f"the arguments are not a list: {args!r}"
    if not isinstance(kwargs, Mapping):
        return f"the keyword arguments are not a mapping: {kwargs!r}"
    for name, kind in _KINDS.items():
        value = headers.get(name)
        if value and not isinstance(value, kind):
            return f"the header {name!r} is {value!r}"
    if not _is_pair_of_numbers(headers.get("timelimit")):
        return f"the header 'timelimit' is not a pair of seconds: {headers['timelimit']!r}"
    if not all(isinstance(name, str) for name in headers.get("stamped_headers") or ()):
        return f"the header 'stamped_headers' is not a list of names: {headers['stamped_headers']!r}"
    if embed and not isinstance(embed, Mapping):
        return f"the third part of the body is not a mapping: {embed!r}"
    return _embed_error(embed or {})


#: Headers that Celery reads in the worker's main process -> their types, if they have a value.
_KINDS: dict[str, type | tuple[type, ...]] = {
    "id": _SIMPLE,
    "root_id": _SIMPLE,
    "parent_id": _SIMPLE,
    "group": _SIMPLE,
    "shadow": str,
    "retries": int,
    "stamped_headers": (list, tuple),
    "stamps": Mapping,
}


def _is_pair_of_numbers(value: Any) -> bool:
    if not value:
        return True
    if not isinstance(value, list | tuple) or len(value) != 2:
        return False
    return all(limit is None or (isinstance(limit, int | float) and isfinite(limit)) for limit in value)


def _embed_error(embed: Mapping[str, Any]) -> str:
    for name in ("callbacks", "errbacks", "chain"):
        signatures = embed.get(name)
        if signatures and not (
            isinstance(signatures, list | tuple) and all(isinstance(signature, Mapping) for signature in signatures)
        ):
            return f"{name!r} in the body is not a list of signatures: {signatures!r}"
    chord = embed.get("chord")
    return f"'chord' in the body is not a signature: {chord!r}" if chord and not isinstance(chord, Mapping) else ""


def note_refusal(message: Delivered, why: str) -> str:
    """Set the reason of the message's poison record; returns it."""
    message.reason = in_one_line(f"The task cannot run: {why}", _MAX_REASON)
    return message.reason


class TolerantConsumerStep(bootsteps.StartStopStep):  # type: ignore[misc]
    """Celery bootstep: a message that the consumer fails at becomes poison, and the worker continues."""

    requires = (Tasks,)

    def start(self, c: Any) -> None:
        create, reject_invalid = type(c).create_task_handler, type(c).on_invalid_task

        def on_invalid_task(body: Any, message: Any, exc: Exception) -> Any:
            if isinstance(message, Delivered) and not message.reason and not message.decode_error():
                note_refusal(message, str(exc))
            return reject_invalid(c, body, message, exc)

        c.on_invalid_task = on_invalid_task
        c.create_task_handler = lambda *given, **named: _tolerant(create(c, *given, **named))


def _tolerant(handle: Any) -> Any:
    def on_task_received(message: Any) -> Any:
        try:
            return handle(message)
        except SHAPE_ERRORS as error:
            if not isinstance(message, Delivered):
                raise
            log.exception("Celery failed at message %s; the message becomes poison.", message.delivery_tag)
            if not message.acknowledged:
                note_refusal(message, f"{type(error).__name__}: {error}")
                message.reject(requeue=False)

    return on_task_received


#: Exceptions that end a task without being a failure of it.
_NO_FAILURE = (Retry, Ignore, Reject, Terminated, MemoryError)


def install(app: Any) -> None:
    """Use ``TolerantRequest`` and the bootstep of malformed tasks in the workers of this process."""
    ended_tasks.use(app)
    app.steps["consumer"].add(TolerantConsumerStep)
    if Task.Request == "celery.worker.request:Request":
        Task.Request = f"{__name__}:{TolerantRequest.__name__}"


class TolerantRequest(CeleryRequest):
    """A task that a worker has received. For messages of other brokers it behaves as Celery's own class."""

    #: The ends that Celery requests while the task fails: None is an ack, a bool a rejection with that ``requeue``.
    _requested_ends: list[bool | None] | None = None
    #: Whether the task succeeded before, or is retried.
    _not_failed = False
    _is_stored = False

    def __init__(self, message: Any, *given: Any, **named: Any) -> None:
        if not isinstance(message, Delivered):
            super().__init__(message, *given, **named)
            return
        try:
            super().__init__(message, *given, **named)
            wrong = task_error(self._request_dict, self._payload)
        except InvalidTaskError as error:
            wrong = str(error) or repr(error)
        except SHAPE_ERRORS as error:
            wrong = f"{type(error).__name__}: {error}"
        if wrong:
            raise InvalidTaskError(note_refusal(message, wrong))

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # Celery derives a class per task, with this method of its own.
        super().__init_subclass__(**kwargs)
        if "execute_using_pool" in cls.__dict__:
            cls.execute_using_pool = _guarded(cls.__dict__["execute_using_pool"])

    def _refuse(self, pool: Any, error: Exception) -> None:
        """Move the message of a task to poison that could not be sent to the pool."""
        for job in list(getattr(getattr(pool, "_pool", None), "_cache", {}).values()):
            if getattr(job, "correlation_id", None) == self.id:
                job.discard()  # else a warm shutdown waits for it
        state.task_ready(self)
        note_refusal(self._message, f"{type(error).__name__}: {error}")
        self.reject(requeue=False)

    def acknowledge(self) -> None:
        if self._requested_ends is None:
            super().acknowledge()
        else:
            self._requested_ends.append(None)

    def reject(self, requeue: bool = False) -> None:
        if self._requested_ends is None:
            super().reject(requeue=requeue)
        else:
            self._requested_ends.append(requeue)

    def on_failure(self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False) -> Any:
        exc = exc_info.exception
        if isinstance(exc, ExceptionWithTraceback):
            exc = exc.exc
        stopped = isinstance(exc, SystemExit | KeyboardInterrupt) and (self._already_cancelled or self._already_revoked)
        end = super().on_failure
        if isinstance(self._message, Delivered) and not stopped:
            # Celery requeues it at once, without a limit.
            self._message.process_died = isinstance(exc, WorkerLostError | SystemExit | KeyboardInterrupt)
        if stopped or isinstance(exc, _NO_FAILURE):
            return end(exc_info, send_failed_event, return_ok)
        return self._end(lambda: end(exc_info, send_failed_event, return_ok), exc, str(exc_info.traceback))

    def on_timeout(self, soft: bool, timeout: float) -> Any:
        end = super().on_timeout
        if soft or state.should_terminate:
            return end(soft, timeout)
        return self._end(lambda: end(soft, timeout), TimeLimitExceeded(timeout), "")

    def _success_was_stored(self) -> Any:
        found = super()._success_was_stored()
        self._not_failed = self._not_failed or bool(found)
        return found

    def _retry_worker_lost(self, *given: Any) -> Any:
        retried = super()._retry_worker_lost(*given)
        self._not_failed = self._not_failed or bool(retried)
        return retried

    def _end(self, end: Callable[[], Any], exc: BaseException, traceback: str) -> Any:
        message = self._message
        if not isinstance(message, Delivered) or not message.lease or not self._keeps_failed(message):
            return end()
        requested_ends: list[bool | None] = []
        self._requested_ends = requested_ends
        try:
            return end()
        finally:
            self._requested_ends = None
            if not self._is_stored and not self._not_failed and True not in requested_ends:
                self._is_stored = True
                self._store_poison(message, exc, traceback)
            else:
                for requeue in requested_ends:
                    super().acknowledge() if requeue is None else super().reject(requeue=requeue)

    def _keeps_failed(self, message: Delivered) -> bool:
        keep_failed = getattr(self.task, "keep_failed", None)
        return bool(message.channel.keeps_failed if keep_failed is None else keep_failed)

    def _store_poison(self, message: Delivered, exc: BaseException, traceback: str) -> None:
        error = describe(exc)
        kind = error["exception_type"]
        message.reason = f"Task {self.name} has failed: {kind}: {error['exception_message']}"
        message.failure = {
            **error,
            "traceback": clean(traceback, MAX_TEXT) or error["traceback"],
            "group_key": hashlib.sha256(f"{kind}@{self.name}".encode(errors="replace")).hexdigest()[:32],
            "attempts": int(self._request_dict.get("retries") or 0) + 1,
        }
        self.acknowledged = True
        try:
            if not message.acknowledged:
                message.reject(requeue=False)
                return
            alias = message.channel.alias

            def store() -> None:
                with transaction.atomic(using=alias):
                    poison.store_acked(alias, message)

            retrying.with_retries(alias, store)
        except Error as error:
            log.error("Task %s[%s] failed, and its poison record could not be written: %s", self.name, self.id, error)


def _guarded(execute: Callable[..., Any]) -> Callable[..., Any]:
    """A task that cannot be sent to the pool, as one whose arguments cannot be pickled, becomes poison. Celery calls
    this from timers as well (ETA, rate limit), outside of its error handling; after TaskRevokedError it frees the place
    in the pool."""

    def execute_using_pool(self: Any, pool: Any, **kwargs: Any) -> Any:
        try:
            return execute(self, pool, **kwargs)
        except (*SHAPE_ERRORS, PicklingError) as error:
            if not isinstance(self._message, Delivered):
                raise
            log.exception("Task %s[%s] could not be sent to the pool; its message becomes poison.", self.name, self.id)
            self._refuse(pool, error)
            raise TaskRevokedError(self.id) from error

    return execute_using_pool
