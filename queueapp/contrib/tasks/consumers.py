"""Running tasks: each is a consumer of its own, found by its path, with its own attempts, waits and time limit.

What a task returned is kept with the ack where its message is leased, and in the transaction of the receive elsewhere. An
attempt that fails is written down by the policy, in the transaction that carries its verdict out.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from inspect import iscoroutinefunction
from time import monotonic
from typing import Any

from asgiref.sync import sync_to_async
from django.utils import timezone

from ... import registry
from ...consuming.context import Context
from ...consuming.registration import Registration
from ...consuming.registry import registered
from ...consuming.resolver import ConsumerResolver
from ...errors import InvalidOption, QueueNotFound, UndecodableMessage
from ...failures.policy import accepted, default_policy
from ...failures.verdicts import RetryLater, RetryNow, Verdict
from ...models import Semantics
from ...sql.claims import HEADERS
from . import result_store
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
from .import_task import restored, task_at
from .result_reader import delete_lost, errors_from
from .result_store import Finished, Pending, keep_failure, keep_now, sent_at, worker_id
from .serialization import Said, arguments_of
from .task import options_of
from .task_options import ANY

log = logging.getLogger("queueapp")

#: What an attempt leaves in ``Context.items`` for the policy: where and when it began.
BEGAN = "queueapp.contrib.tasks"


def backends() -> list[QueueBackend]:
    """The backends of TASKS that are ours and whose options can be read."""
    found = [one for one in task_backends.all() if isinstance(one, QueueBackend)]
    return [one for one in found if one.problem is None]


def queue_of(backend: QueueBackend) -> Any:
    """The queue of a backend; None where there is none of that name, which a check says."""
    try:
        return registry.queues.find(backend.configuration.queue)
    except QueueNotFound:
        return None


def install() -> None:
    """Register the tasks of every backend, so that ``runqueueworker`` takes their queues."""
    by_queue: dict[Any, list[QueueBackend]] = {}
    for backend in backends():
        if (queue := queue_of(backend)) is not None:
            by_queue.setdefault(queue, []).append(backend)
    for queue, some in by_queue.items():
        finder = TaskFinder(queue, varies=len(some) > 1)
        names = {name for one in some for name in one.worked} if queue.delivery.recipients else {ANY}
        if queue.delivery.recipients and any(not one.queues for one in some):
            names.add(ANY)
        for name in sorted(names):
            registered.add(Registration(queue, name, bytes, finder.refuse, {}, finder))


class TaskFinder(ConsumerResolver):
    """The tasks of one queue."""

    def __init__(self, queue: Any, *, varies: bool = False) -> None:
        self.queue = queue
        self.varies = varies
        self._leases = queue.delivery.semantics is Semantics.AT_LEAST_ONCE
        self._once = queue.delivery.semantics is Semantics.AT_MOST_ONCE
        self._pending = Pending()
        self._registrations: dict[tuple[str, str], Registration] = {}

    @staticmethod
    def refuse(message: bytes) -> None:
        """Never called: a task's own registration is."""
        raise UndecodableMessage("This message names no task.")

    # -- who handles it ------------------------------------------------------------------------------------------------

    def find(self, type_name: str, variant: str = "") -> Registration:
        found = self._registrations.get((type_name, variant))
        if found is None:
            everyone = backends()
            task = task_at(type_name, [module for one in everyone for module in one.configuration.modules])
            own = [one for one in everyone if queue_of(one) is self.queue]
            found = self._registration(task, type_name, _one_of(own, variant or task.backend))
            if len(self._registrations) >= _MOST:
                self._registrations.clear()
            self._registrations[type_name, variant] = found
        return found

    def variant_of(self, headers: str) -> str:
        """The backend that a task was enqueued with: what a task does not say for itself, that one says."""
        return _said(headers).backend

    def _registration(self, task: Any, path: str, backend: QueueBackend | None) -> Registration:
        given = {**(backend.configuration.recoverability if backend else {}), **options_of(task)}
        given["policy"] = partial(self._decide, given.get("policy"))
        run = self._run_async if iscoroutinefunction(task.func) else self._run
        return Registration(self.queue, path[-200:], bytes, run(task), given)

    # -- running -------------------------------------------------------------------------------------------------------

    def _run(self, task: Any) -> Callable[[bytes, Context], None]:
        def run(body: bytes, context: Context) -> None:
            result, args, kwargs = self._begin(task, body, context)
            self._end(result, context, task.func(*args, **kwargs))

        return run

    def _run_async(self, task: Any) -> Callable[[bytes, Context], Any]:
        # Not async itself: it begins and ends in the worker's own thread, which has the connection with the transaction, and
        # where receivers of signals may use the ORM.
        def run(body: bytes, context: Context) -> Any:
            result, args, kwargs = self._begin(task, body, context)
            return self._ended(result, context, task.func(*args, **kwargs))

        return run

    async def _ended(self, result: Any, context: Context, running: Any) -> None:
        await sync_to_async(self._end)(result, context, await running)

    def _begin(self, task: Any, body: bytes, context: Context) -> tuple[Any, Sequence[Any], dict[str, Any]]:
        context.items[BEGAN] = (context.alias, monotonic(), None)
        args, kwargs = arguments_of(body)
        before = result_store.earlier(context.alias, context.message_id) if context.attempt > 1 else None
        now = timezone.now()
        result: Any = TaskResult(
            task=_restored(context._claimed[HEADERS]),
            id=str(context.message_id),
            status=TaskResultStatus.RUNNING,
            enqueued_at=sent_at(context.message_id),
            started_at=before.started_at if before and before.started_at else now,
            finished_at=None,
            last_attempted_at=now,
            args=args,
            kwargs=kwargs,
            backend=_said(context._claimed[HEADERS]).backend,
            errors=errors_from(before.errors) if before else [],
            worker_ids=[*(json.loads(before.worker_ids) if before else []), worker_id()],
        )
        context.items[BEGAN] = (context.alias, monotonic(), before)
        tell(task_started, result)
        return result, ([TaskContext(task_result=result), *args] if task.takes_context else args), kwargs

    def _end(self, result: Any, context: Context, returned: Any) -> None:
        value = normalize_json(returned)
        text = json.dumps(value, separators=(",", ":"))
        alias, started, before = context.items[BEGAN]
        said = _said(context._claimed[HEADERS])
        if _keeps(said.backend):
            finished = Finished(
                said, before.started_at if before else None, started, monotonic(), text,
                before.errors if before else "[]", json.dumps(result.worker_ids),
            )  # fmt: skip
            if self._leases:
                self._pending.add(alias, context.seq, finished)
            else:
                keep_now(context.queue, alias, finished, context._claimed)
        _set(result, "_return_value", value)
        _set(result, "finished_at", timezone.now())
        _set(result, "status", TaskResultStatus.SUCCESSFUL)
        tell(task_finished, result)

    # -- ending --------------------------------------------------------------------------------------------------------

    def ack(self, sql: Any, connection: Any, seqs: Sequence[int], token: uuid.UUID) -> int:
        return len(self._pending.ack(sql, connection, seqs, token))

    def try_ack(self, sql: Any, connection: Any, seqs: Sequence[int], token: uuid.UUID, wait_ms: int) -> list[int]:
        return self._pending.ack(sql, connection, seqs, token, wait_ms)

    def _decide(self, policy: Callable[[Any], Verdict] | None, failure: Any) -> Verdict:
        """The policy of every task: the task's own or the default one, and what is written down of the attempt."""
        alias, started, _ = failure.items.get(BEGAN) or (result_store.alias_of(failure.queue), None, None)
        self._pending.forget(alias, failure.row.seq)  # it had returned, but was late
        wanted = policy is not None and not isinstance(failure.exception, UndecodableMessage)
        verdict = policy(failure) if wanted and policy is not None else default_policy(failure)
        if _keeps(_said(failure.row.headers).backend):
            # Of what is no verdict whoever asked for one says so, and does as the default policy says.
            carried_out = accepted(verdict) or default_policy(failure)
            again = isinstance(carried_out, RetryNow | RetryLater) and not self._once
            keep_failure(alias, failure, again=again, started=started, worker=worker_id())
        return verdict

    def run_maintenance(self, alias: str, may_continue: Callable[[], bool]) -> None:
        for backend in backends():
            retention = backend.configuration.retention
            if retention and queue_of(backend) is self.queue:
                count = result_store.delete_old(alias, backend.alias, retention, may_continue)
                count += delete_lost(self.queue, alias, backend.alias, retention, may_continue)
                if count:
                    log.info("%d results of tasks of %r were deleted: their retention is over.", count, backend.alias)


def _one_of(own: Sequence[QueueBackend], alias: str) -> QueueBackend | None:
    """The backend of this alias; of another one, that these settings do not have on this queue, the first that is on it."""
    return next((one for one in own if one.alias == alias), own[0] if own else None)


def tell(signal: Any, result: Any) -> None:
    """Send a signal of the framework; the sender is the class of the backend. A receiver that raises changes nothing."""
    for receiver, answer in signal.send_robust(sender=_class_of(result.backend), task_result=result):
        if isinstance(answer, Exception):
            log.error("A receiver of a signal of a task failed: %r: %r", receiver, answer)


def _class_of(alias: str) -> type:
    backend = task_backends[alias] if alias in task_backends.settings else None
    return type(backend) if isinstance(backend, QueueBackend) else QueueBackend


def _keeps(alias: str) -> bool:
    """Whether results of this backend are kept. One that is not in these settings may be in those of who enqueued."""
    try:
        backend = task_backends[alias] if alias in task_backends.settings else None
        return not isinstance(backend, QueueBackend) or backend.configuration.keeps_results
    except InvalidOption:
        return True


#: Headers longer than this are not worth remembering, nor are more tasks than this, by backend.
_LONG, _MOST = 500, 4096


def _said(headers: str) -> Said:
    # Most tasks of one path have the same headers.
    return _remembered(headers) if len(headers) < _LONG else Said.by(headers)


_remembered = lru_cache(maxsize=1024)(Said.by)


def _restored(headers: str) -> Any:
    return _task_of(headers) if len(headers) < _LONG else _task_of.__wrapped__(headers)


@lru_cache(maxsize=1024)
def _task_of(headers: str) -> Any:
    own = [one.configuration for one in backends()]
    return restored(_said(headers), [module for one in own for module in one.modules])


def forget() -> None:
    """What is remembered of headers, whose meaning depends on the settings (tests)."""
    _remembered.cache_clear()
    _task_of.cache_clear()


_set = object.__setattr__
