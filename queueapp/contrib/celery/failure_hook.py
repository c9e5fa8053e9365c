"""A task that has failed for good is kept as poison, with its traceback: out of retries, over its time limit, or its process died.

Celery acks such a message. Here it is moved to the poison table instead, in one transaction if it is still leased
(``acks_late``), and else written down anew from what the worker got. Requeued from the poison page it is run again, with the
retries left that it had. ``broker_transport_options["keep_failed"] = False``, or ``keep_failed = False`` on a task, turns it off.
It is the worker's main process that does it, which knows of every end, also of one that its child did not live to see.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from typing import Any

from billiard.einfo import ExceptionWithTraceback
from celery.app.task import Task
from celery.exceptions import Ignore, InvalidTaskError, Reject, Retry, TimeLimitExceeded, WorkerLostError
from celery.worker import state
from celery.worker.request import Request as CeleryRequest
from celery.worker.request import Terminated
from django.db import Error, transaction

from ...failures.history import MAX_TEXT, clean, describe
from . import poison, retrying
from .malformed import SHAPE_ERRORS, TolerantConsumerStep, refused, what_is_wrong
from .qos import Delivered

log = logging.getLogger("queueapp")

#: What ends a task and is no failure of it.
_NO_FAILURE = (Retry, Ignore, Reject, Terminated, MemoryError)


def install(app: Any) -> None:
    """Let the workers of this process keep what has failed, and what they cannot run."""
    app.steps["consumer"].add(TolerantConsumerStep)
    if Task.Request == "celery.worker.request:Request":
        Task.Request = f"{__name__}:Request"


class Request(CeleryRequest):
    """A task that a worker has received. Of another broker's messages it is Celery's own."""

    #: What Celery asks for while it ends the task: None is an ack, else whether what it rejects is put back.
    _asked: list[bool | None] | None = None
    #: It has not failed after all, or it is tried again.
    _spared = False
    _kept = False

    def __init__(self, message: Any, *given: Any, **named: Any) -> None:
        if not isinstance(message, Delivered):
            super().__init__(message, *given, **named)
            return
        try:
            super().__init__(message, *given, **named)
            wrong = what_is_wrong(self._request_dict, self._payload)
        except InvalidTaskError as error:
            wrong = str(error) or repr(error)
        except SHAPE_ERRORS as error:
            wrong = f"{type(error).__name__}: {error}"
        if wrong:
            raise InvalidTaskError(refused(message, wrong))

    def acknowledge(self) -> None:
        if self._asked is None:
            super().acknowledge()
        else:
            self._asked.append(None)

    def reject(self, requeue: bool = False) -> None:
        if self._asked is None:
            super().reject(requeue=requeue)
        else:
            self._asked.append(requeue)

    def on_failure(self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False) -> Any:
        exc = exc_info.exception
        if isinstance(exc, ExceptionWithTraceback):
            exc = exc.exc
        stopped = isinstance(exc, SystemExit | KeyboardInterrupt) and (self._already_cancelled or self._already_revoked)
        end = super().on_failure
        if isinstance(self._message, Delivered) and not stopped:
            # Celery puts it back at once, and would for ever.
            self._message.died = isinstance(exc, WorkerLostError | SystemExit | KeyboardInterrupt)
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
        self._spared = self._spared or bool(found)
        return found

    def _retry_worker_lost(self, *given: Any) -> Any:
        retried = super()._retry_worker_lost(*given)
        self._spared = self._spared or bool(retried)
        return retried

    def _end(self, end: Callable[[], Any], exc: BaseException, traceback: str) -> Any:
        message = self._message
        if not isinstance(message, Delivered) or not message.held or not self._is_wanted(message):
            return end()
        asked: list[bool | None] = []
        self._asked = asked
        try:
            return end()
        finally:
            self._asked = None
            if not self._kept and not self._spared and True not in asked:
                self._kept = True
                self._keep(message, exc, traceback)
            else:
                for requeue in asked:
                    super().acknowledge() if requeue is None else super().reject(requeue=requeue)

    def _is_wanted(self, message: Delivered) -> bool:
        own = getattr(self.task, "keep_failed", None)
        return bool(message.channel.keeps_failed if own is None else own)

    def _keep(self, message: Delivered, exc: BaseException, traceback: str) -> None:
        told = describe(exc)
        kind = told["exception_type"]
        message.reason = f"Task {self.name} has failed: {kind}: {told['exception_message']}"
        message.failure = {
            **told,
            "traceback": clean(traceback, MAX_TEXT) or told["traceback"],
            "group_key": hashlib.sha256(f"{kind}@{self.name}".encode(errors="replace")).hexdigest()[:32],
            "attempts": int(self._request_dict.get("retries") or 0) + 1,
        }
        self.acknowledged = True
        try:
            if not message.acknowledged:
                message.reject(requeue=False)
                return
            alias = message.channel.alias

            def keep() -> None:
                with transaction.atomic(using=alias):
                    poison.bury_acked(alias, message)

            retrying.with_retries(alias, keep)
        except Error as error:
            log.error("Task %s[%s] has failed and could not be kept as poison: %s", self.name, self.id, error)
