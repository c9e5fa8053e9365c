"""Runs tasks: each task is a consumer, resolved by its path, with its own attempts, delays and time limit.

The return value is stored with the ack if the message is leased, else in the transaction of the receive. A failed
attempt is stored by the policy, in the transaction that applies its verdict.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import lru_cache, partial
from inspect import iscoroutinefunction
from time import monotonic
from typing import Any

from asgiref.sync import sync_to_async

from ... import registry, signals
from ...consuming.context import Context
from ...consuming.registry import ConsumerResolver, Registration, registered
from ...errors import InvalidOption, QueueNotFound, UndecodableMessage
from ...failures.recoverability import RetryLater, RetryNow, Verdict, accepted, default_policy
from ...models import Semantics
from ...sql.claims import HEADERS
from . import results
from .backend import QueueBackend
from .compat import (
    TaskContext,
    TaskResult,
    TaskResultStatus,
    normalize_json,
    task_backends,
    task_finished,
    task_started,
)
from .results import Finished, PendingResults, delete_lost, errors_from, sent_at, store_failure, store_now, worker_id
from .serialization import TaskHeaders, arguments_of, restored, task_at
from .task_options import ANY, options_of

log = logging.getLogger("queueapp")

#: Key in ``Context.items`` under which an attempt stores its database, start and earlier result for the policy.
ATTEMPT = "queueapp.contrib.tasks"


def backends() -> list[QueueBackend]:
    """The queue backends of TASKS whose options are valid."""
    return [found for found in task_backends.all() if isinstance(found, QueueBackend) and found.problem is None]


def queue_of(backend: QueueBackend) -> Any:
    """The queue of a backend; None if it does not exist, which a check reports."""
    try:
        return registry.queues.find(backend.configuration.queue)
    except QueueNotFound:
        return None


def install() -> None:
    """Register the tasks of every backend, so that ``runqueueworker`` consumes their queues."""
    by_queue: dict[Any, list[QueueBackend]] = {}
    for backend in backends():
        if (queue := queue_of(backend)) is not None:
            by_queue.setdefault(queue, []).append(backend)
    for queue, of_queue in by_queue.items():
        resolver = TaskResolver(queue, varies=len(of_queue) > 1)
        names = {name for backend in of_queue for name in backend.worked} if queue.delivery.recipients else {ANY}
        if queue.delivery.recipients and any(not backend.queues for backend in of_queue):
            names.add(ANY)
        for name in sorted(names):
            registered.add(Registration(queue, name, bytes, resolver.refuse, {}, resolver))


class TaskResolver(ConsumerResolver):
    """The tasks of one queue."""

    def __init__(self, queue: Any, *, varies: bool = False) -> None:
        self.queue = queue
        self.varies = varies
        self._leases = queue.delivery.semantics is Semantics.AT_LEAST_ONCE
        self._once = queue.delivery.semantics is Semantics.AT_MOST_ONCE
        self._pending = PendingResults()
        self._registrations: dict[tuple[str, str], Registration] = {}

    @staticmethod
    def refuse(message: bytes) -> None:
        """Never called: the registration of the task is."""
        raise UndecodableMessage("The message does not name a task.")

    # -- resolving ------------------------------------------------------------------------------------------------

    def find(self, type_name: str, variant: str = "") -> Registration:
        found = self._registrations.get((type_name, variant))
        if found is None:
            all_backends = backends()
            task = task_at(type_name, [module for found in all_backends for module in found.configuration.modules])
            of_queue = [found for found in all_backends if queue_of(found) is self.queue]
            found = self._registration(task, type_name, _backend_for(of_queue, variant or task.backend))
            if len(self._registrations) >= _MAX_CACHED_TASKS:
                self._registrations.clear()
            self._registrations[type_name, variant] = found
        return found

    def variant_of(self, headers: str) -> str:
        """The backend that a task was enqueued with. Its options apply where the task has none."""
        return _task_headers(headers).backend

    def _registration(self, task: Any, path: str, backend: QueueBackend | None) -> Registration:
        given = {**(backend.configuration.recoverability if backend else {}), **options_of(task)}
        given["policy"] = partial(self._decide, given.get("policy"))
        run = self._run_async if iscoroutinefunction(task.func) else self._run
        return Registration(self.queue, path[-200:], bytes, run(task), given)

    # -- running -------------------------------------------------------------------------------------------------------

    def _run(self, task: Any) -> Callable[[bytes, Context], None]:
        def run(body: bytes, context: Context) -> None:
            result, args, kwargs = self._start(task, body, context)
            self._finish(result, context, task.func(*args, **kwargs))

        return run

    def _run_async(self, task: Any) -> Callable[[bytes, Context], Any]:
        # Not async itself: it starts and finishes in the worker's own thread, which has the connection with the
        # transaction and where signal receivers may use the ORM.
        def run(body: bytes, context: Context) -> Any:
            result, args, kwargs = self._start(task, body, context)
            return self._finish_async(result, context, task.func(*args, **kwargs))

        return run

    async def _finish_async(self, result: Any, context: Context, running: Any) -> None:
        await sync_to_async(self._finish)(result, context, await running)

    def _start(self, task: Any, body: bytes, context: Context) -> tuple[Any, Sequence[Any], dict[str, Any]]:
        context.items[ATTEMPT] = (context.alias, monotonic(), None)
        args, kwargs = arguments_of(body)
        before = results.earlier_result(context.alias, context.message_id) if context.attempt > 1 else None
        now = datetime.now(UTC)
        result: Any = TaskResult(
            task=_task_from_headers(context._claimed[HEADERS]),
            id=str(context.message_id),
            status=TaskResultStatus.RUNNING,
            enqueued_at=sent_at(context.message_id),
            started_at=before.started_at if before and before.started_at else now,
            finished_at=None,
            last_attempted_at=now,
            args=args,
            kwargs=kwargs,
            backend=_task_headers(context._claimed[HEADERS]).backend,
            errors=errors_from(before.errors) if before else [],
            worker_ids=[*(json.loads(before.worker_ids) if before else []), worker_id()],
        )
        context.items[ATTEMPT] = (context.alias, monotonic(), before)
        send_signal(task_started, result)
        return result, ([TaskContext(task_result=result), *args] if task.takes_context else args), kwargs

    def _finish(self, result: Any, context: Context, returned: Any) -> None:
        value = normalize_json(returned)
        text = json.dumps(value, separators=(",", ":"))
        alias, started, before = context.items[ATTEMPT]
        task_headers = _task_headers(context._claimed[HEADERS])
        if _stores_results(task_headers.backend):
            finished = Finished(
                task_headers, before.started_at if before else None, started, monotonic(), text,
                before.errors if before else "[]", json.dumps(result.worker_ids),
            )  # fmt: skip
            if self._leases:
                self._pending.add(alias, context.seq, finished)
            else:
                store_now(context.queue, alias, finished, context._claimed)
        _set(result, "_return_value", value)
        _set(result, "finished_at", datetime.now(UTC))
        _set(result, "status", TaskResultStatus.SUCCESSFUL)
        send_signal(task_finished, result)

    # -- ending --------------------------------------------------------------------------------------------------------

    def ack(self, sql: Any, connection: Any, seqs: Sequence[int], token: uuid.UUID) -> int:
        return len(self._pending.ack(sql, connection, seqs, token))

    def try_ack(self, sql: Any, connection: Any, seqs: Sequence[int], token: uuid.UUID, wait_ms: int) -> list[int]:
        return self._pending.ack(sql, connection, seqs, token, wait_ms)

    def _decide(self, policy: Callable[[Any], Verdict] | None, failure: Any) -> Verdict:
        """The policy of every task: applies the task's own or the default policy and stores the failed attempt."""
        alias, started, _ = failure.items.get(ATTEMPT) or (results.alias_of(failure.queue), None, None)
        self._pending.forget(alias, failure.row.seq)  # it had returned, but after its time limit
        wanted = policy is not None and not isinstance(failure.exception, UndecodableMessage)
        verdict = policy(failure) if wanted and policy is not None else default_policy(failure)
        if _stores_results(_task_headers(failure.row.headers).backend):
            # The caller reports a value that is not a verdict, and applies the default policy.
            applied = accepted(verdict) or default_policy(failure)
            again = isinstance(applied, RetryNow | RetryLater) and not self._once
            store_failure(alias, failure, again=again, started=started, worker=worker_id())
        return verdict

    def run_maintenance(self, alias: str, may_continue: Callable[[], bool]) -> None:
        for backend in backends():
            retention = backend.configuration.retention
            if retention and queue_of(backend) is self.queue:
                count = results.delete_old(alias, backend.alias, retention, may_continue)
                count += delete_lost(self.queue, alias, backend.alias, retention, may_continue)
                if count:
                    log.info(
                        "Task results of %r: %d %s deleted after the retention.",
                        backend.alias,
                        count,
                        "row was" if count == 1 else "rows were",
                    )


def _backend_for(backends: Sequence[QueueBackend], alias: str) -> QueueBackend | None:
    """The backend with this alias or, if these settings have none on this queue, the first one on it."""
    return next((backend for backend in backends if backend.alias == alias), backends[0] if backends else None)


def send_signal(signal: Any, result: Any) -> None:
    """Send a signal of the framework; the sender is the class of the backend. An exception of a receiver is logged."""
    for receiver, answer in signal.send_robust(sender=_class_of(result.backend), task_result=result):
        if isinstance(answer, Exception):
            log.error("A receiver of a task signal failed: %r: %r", receiver, answer)


def _class_of(alias: str) -> type:
    backend = task_backends[alias] if alias in task_backends.settings else None
    return type(backend) if isinstance(backend, QueueBackend) else QueueBackend


def _stores_results(alias: str) -> bool:
    """Whether results of this backend are stored. An unknown backend may be known in the settings of the sender."""
    try:
        backend = task_backends[alias] if alias in task_backends.settings else None
        return not isinstance(backend, QueueBackend) or backend.configuration.keeps_results
    except InvalidOption:
        return True


#: Maximum length of cached headers, and maximum number of cached tasks per queue.
_MAX_CACHED_LENGTH, _MAX_CACHED_TASKS = 500, 4096


def _task_headers(headers: str) -> TaskHeaders:
    # Most messages of one task have equal headers.
    return _cached_headers(headers) if len(headers) < _MAX_CACHED_LENGTH else TaskHeaders.by(headers)


_cached_headers = lru_cache(maxsize=1024)(TaskHeaders.by)


def _task_from_headers(headers: str) -> Any:
    return _task_of(headers) if len(headers) < _MAX_CACHED_LENGTH else _task_of.__wrapped__(headers)


@lru_cache(maxsize=1024)
def _task_of(headers: str) -> Any:
    modules = [module for backend in backends() for module in backend.configuration.modules]
    return restored(_task_headers(headers), modules)


def forget() -> None:
    """Clear the caches of headers, whose meaning depends on the settings (tests)."""
    _cached_headers.cache_clear()
    _task_of.cache_clear()


_set = object.__setattr__


# -- final failures ---------------------------------------------------------------------------------------------------


def connect_signals() -> None:
    """Send ``task_finished`` for tasks that have failed for good, after the commit: by the policy after the last
    attempt, a supervisor whose worker died, or an operator."""
    signals.poisoned.connect(_on_failure, dispatch_uid="queueapp.contrib.tasks.poisoned")
    signals.discarded.connect(_on_failure, dispatch_uid="queueapp.contrib.tasks.discarded")


def _on_failure(sender: Any, failure: Any, **_: Any) -> None:
    if sender is None or not isinstance(registered.resolver_of(sender), TaskResolver):
        return
    attempt = failure.items.get(ATTEMPT)
    result = results.read(sender, attempt[0] if attempt else results.alias_of(sender), failure.row.id)
    if result is None or result.status != TaskResultStatus.FAILED:
        return  # requeued meanwhile, or discarded by a policy without a stored result
    try:
        raise failure.exception
    except BaseException:  # sent from here: receivers, Django's own log among them, read the current exception
        send_signal(task_finished, result)
