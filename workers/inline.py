"""Handles one message in the calling thread, by the receiver of its queue's semantics: for eager mode and
``queueapp.testing``.

Claims, failures and endings are those of a worker. The differences follow from the thread, which is not a worker's own:

* it may be in a transaction (of a test, or of an eager sender), which is neither committed nor closed here. What a
  worker does in a transaction of its own is done in a savepoint, also for a handler that would run in autocommit; what
  would follow its commit is done when its message has ended;
* there is no throttle and no breaker: a database error goes to the caller;
* each call scans from the beginning, since a test may have inserted rows anywhere.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import lru_cache
from typing import Any

from django.db import connections

from queueapp import callbacks, overrides, signals
from queueapp.consuming.context import handling
from queueapp.consuming.registry import registered
from queueapp.errors import QueueError, UnsupportedServer
from queueapp.failures import limits
from queueapp.flow import results
from queueapp.inline import Outcome, Rehearsed
from queueapp.messages import readable_headers
from queueapp.messages.ids import as_uuid
from queueapp.models import KeyTokenBucket, Now, Semantics, Subscriber
from queueapp.receiving import barriers
from queueapp.receiving.low_water_marks import LowWaterMarks, Priority64Marks
from queueapp.sql import SessionState, backend_of, queue_sql
from queueapp.sql.claims import BODY, HEADERS, ID, SEQ, Claimed
from queueapp.topics.evaluate_pending import evaluate_pending_messages

from .connections.connection_guard import ConnectionGuard, unwatch_thread
from .processes.watchdog import Watchdog
from .receiving.events import NoPump
from .receiving.handlers import HandlerTable
from .receiving.quarantine import Quarantine
from .receiving.queue_state import QueueHealth, QueueState
from .receiving.receivers import Receiver, TransactionalReceiver, receiver_class_for
from .receiving.receivers.base import Rollback
from .receiving.receivers.batch_consumers import BatchCaller
from .receiving.receivers.outcomes import receive_barriers

#: Longer than a test takes.
_ALIVE = timedelta(hours=1)
_FEW = 3_000


class TransactionGone(QueueError):
    """A handler ended the transaction in which it was called: that of a test, or of its sender."""


def handle_next(queue: Any, alias: str) -> list[Outcome]:
    """``queueapp.inline.Engine``."""
    handlers = HandlerTable(queue)
    if not handlers:
        return []
    overrides.refresh(alias)
    if queue_sql(queue, connections[alias]).table.has_unevaluated:
        evaluate_pending_messages(queue, alias)
    if queue.delivery.rate_per_key is not None:
        # As ``rate``, which only a pump and ``receive()`` know.
        KeyTokenBucket.objects.using(alias).filter(queue=queue._meta.label).delete()
    state = _queue_state(queue, alias, handlers)
    strategy: Any = receiver_class_for(queue.delivery, handlers)
    task: Any = _inline(strategy)(state, None)
    with ExitStack() as around:
        around.enter_context(_bound(task))
        around.enter_context(_subscribed(state))
        around.enter_context(_watched(task, handlers))
        around.enter_context(_verdicts_of(task))
        return _first_outcomes(task)


def _first_outcomes(task: Any) -> list[Outcome]:
    """Of the next message that is for a consumer here, or of the barriers that are released now, which may be
    several."""
    state: QueueState = task.state
    while True:
        if state.barriers is not None:
            state.barriers.peek()
            receive_barriers(task, state.barriers)
        got = 0
        if not task.happened:
            got = task.receive(1)
        task.run_hooks()
        # The engine's own step that copies a message without a recipient is no consumer of the project.
        if found := [outcome for outcome in task.happened if not outcome.consumer.startswith("queueapp.")]:
            return found
        task.happened.clear()
        if not got and not task.full:
            return []


def _queue_state(
    queue: Any, alias: str, handlers: HandlerTable, health: type[_InlineHealth] | None = None
) -> QueueState:
    delivery = queue.delivery
    levels = tuple((r, p) for p in range(delivery.priorities - 1, -1, -1) for r in handlers.recipients)
    make = Priority64Marks if delivery.priority else LowWaterMarks
    # Of its own, not the process': a test that is rolled back leaves no low-water mark behind.
    marks = make(levels, bool(queue_sql(queue, connections[alias]).table.claim_by))
    events = NoPump()
    return QueueState(
        queue,
        alias,
        events,
        handlers=handlers,
        marks=marks,
        quarantine=Quarantine(),
        health=(health or _InlineHealth)(queue._meta.label, alias, events.stopping),
    )


class _InlineHealth(QueueHealth):
    """Health without waits: no throttle, no breaker."""

    def failed(self) -> None:
        self.stats.failed += 1

    def retry_after(self, error: BaseException, breaker: Any, connection: Any) -> bool:
        raise error


class _RehearsalHealth(_InlineHealth):
    """Reports no changed session: the rollback undoes the change."""

    def warn_session_changed(self, consumer: str, statement: str) -> None: ...


class _BorrowedConnectionGuard(ConnectionGuard):
    """Inside a transaction of the caller: only the own alias is checked. On other aliases the open transaction is the
    caller's as well."""

    def __init__(self, alias: str) -> None:
        super().__init__(alias)
        self._by_alias = {alias: self._connection}


class _Inline(Receiver):
    """Mixed into the receiver of each semantics."""

    #: No message is sent meanwhile, and one message is what was asked for.
    may_gather = False

    def __init__(self, state: QueueState, slot: None) -> None:
        super().__init__(state, slot)
        #: The connections of this thread whose transaction is not its own: the hooks of those that sent wait elsewhere
        #: meanwhile.
        self.borrowed: list[Any] = [
            item for item in connections.all(initialized_only=True) if item.in_atomic_block and item.connection
        ]
        self.nested = connections[self.alias] in self.borrowed
        self.happened: list[Outcome] = []

    @property
    def receivers(self) -> list[Receiver]:
        """As a pump has them, for the watchdog."""
        return [self]

    def bind(self) -> None:
        super().bind()
        if self.nested:
            self.guard = _BorrowedConnectionGuard(self.alias)

    def call(self, claimed: Claimed, *, leased: bool = False) -> BaseException | bool | None:
        if isinstance(self, TransactionalReceiver) and not leased:
            # The savepoint that is its task's own transaction is there already.
            outcome = super().call(claimed, leased=leased)
        else:
            outcome = self._call_as_in_autocommit(claimed, leased)
        if self.nested and self.session_lost:
            raise TransactionGone(f"{outcome} It was called in a transaction of its caller, which has ended.")
        if outcome is not False:
            self.happened.append(self._outcome(claimed, outcome))
        return outcome

    def _call_as_in_autocommit(self, claimed: Claimed, leased: bool) -> BaseException | bool | None:
        """What a handler did before it failed stays there, so it does here, unless the failure broke the
        transaction."""
        points = [(item, item.savepoint()) for item in self.borrowed]
        outcome = super().call(claimed, leased=leased)
        for connection, point in points:
            if connection.closed_in_transaction or not connection.in_atomic_block:
                continue
            if connection.needs_rollback or _is_failed(connection):
                connection.needs_rollback = False
                connection.rollback_exc = None
                connection.savepoint_rollback(point)
                connection.run_on_commit = []
            connection.savepoint_commit(point)
        try:
            self.run_hooks()
        except Exception as error:  # at the end of an atomic block of the handler's
            return outcome if isinstance(outcome, BaseException) else error
        return outcome

    def run_hooks(self) -> None:
        """Run the hooks that wait for a commit as if it had happened: the transaction is the caller's, who may never
        commit it."""
        for connection in self.borrowed:
            hooks, connection.run_on_commit = connection.run_on_commit, []
            for _, hook, robust in hooks:
                try:
                    hook()
                except Exception:
                    if not robust:
                        raise
                    signals.log.exception("A hook that runs after the commit failed.")

    def _outcome(self, claimed: Claimed, outcome: BaseException | bool | None) -> Outcome:
        consumer = self.consumer_of(claimed)
        headers = readable_headers(claimed[HEADERS])
        return Outcome(
            self.queue,
            self.alias,
            as_uuid(claimed[ID]),
            claimed[SEQ],
            consumer.name if consumer else "",
            limits.attempt_of(claimed, keeps_counts=self.keeps_counts),
            headers,
            claimed[BODY],
            recipient=self.sql.table.row_of(claimed).recipient,
            error=outcome if isinstance(outcome, BaseException) else None,
        )

    def decided(self, failure: Any, verdict: Any) -> None:
        """The failure of an attempt was recorded."""
        for place, outcome in enumerate(self.happened):
            if outcome.message_id == failure.row.id and outcome.error is not None and outcome.verdict is None:
                self.happened[place] = replace(outcome, verdict=verdict)

    def restore_connection(self) -> None:
        if not self.nested:
            super().restore_connection()
            return
        self.callback_variables = None
        self._callback_interrupted = False

    def _decide_in_place(self, claimed: Claimed, error: BaseException, connection: Any) -> Any:
        if self.nested:
            raise Rollback  # of the savepoint; then it is recorded in another one
        return super()._decide_in_place(claimed, error, connection)  # type: ignore[misc]


class _Rehearsing(_Inline, Receiver):
    """Calls one handler. It claims and ends nothing, and runs no hooks: the transaction is rolled back."""

    def __init__(self, state: QueueState, slot: None) -> None:
        super().__init__(state, slot)
        if self.handlers.largest_batch:
            self.batches = BatchCaller(self)
        self._is_transactional = state.queue.delivery.semantics is Semantics.TRANSACTIONAL
        self.hooks = 0
        if not self._is_transactional:
            for consumer in self.handlers.bound_consumers:
                consumer.call = self._unmarked(consumer.call)

    def call(self, claimed: Claimed, *, leased: bool = False) -> BaseException | bool | None:
        # ``Receiver.call``, as within the transaction of a receive, or in what stands for autocommit.
        called = super(_Inline, self).call if self._is_transactional else self._call_as_in_autocommit
        outcome = called(claimed, leased=leased)
        self.run_hooks()
        return outcome

    def _unmarked(self, call: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        """A handler in autocommit may catch the error of a statement, after which Django marks the transaction; the
        statement alone was rolled back."""

        def called(message: Any, context: Any) -> None:
            try:
                call(message, context)
            finally:
                for connection in self.borrowed:
                    if (
                        connection.needs_rollback
                        and not connection.closed_in_transaction
                        and not _is_failed(connection)
                    ):
                        connection.needs_rollback = False

        return called

    def run_hooks(self) -> None:
        for connection in self.borrowed:
            self.hooks += len(connection.run_on_commit)
            connection.run_on_commit = []

    def write_headers(self, seq: int, headers: str) -> None:
        if self.queue.delivery.semantics is not Semantics.AT_LEAST_ONCE:
            super().write_headers(seq, headers)


def rehearse(queue: Any, alias: str, columns: Mapping[str, Any]) -> Rehearsed:
    """``queueapp.inline.handle_once``."""
    handlers = HandlerTable(queue)
    if handlers.resolver is not None and handlers.resolver.alone:
        raise QueueError(
            f"{queue._meta.label} has a set consumer, which takes rows of the queue and cannot be rehearsed."
        )
    state = _queue_state(queue, alias, handlers, _RehearsalHealth)
    task = _Rehearsing(state, None)
    if handlers.copies:
        handlers.refresh_subscribers(connections[alias])
    claimed = tuple(columns.get(name) for name in task.sql.table.claimed)
    consumer = task.consumer_of(claimed)
    outcome: BaseException | bool | None = False
    with _bound(task), _watched(task, handlers):
        try:
            outcome = task.call(claimed)
        except Exception as error:  # the handler ended the transaction
            outcome = error
        finally:
            results.forget(alias, queue, columns["seq"])
    name = consumer.name if consumer is not None and outcome is not False else ""
    return Rehearsed(name, outcome if isinstance(outcome, BaseException) else None, task.hooks)


@lru_cache(maxsize=16)
def _inline(strategy: Any) -> Any:
    """The receiver of a semantics that handles one message here, without a worker."""
    return type(f"Inline{strategy.__name__}", (_Inline, strategy), {})


def _is_failed(connection: Any) -> bool:
    try:
        return backend_of(connection).sessions.state(connection, ask=connection.errors_occurred) is SessionState.FAILED
    except UnsupportedServer:
        return False


# -- around a task ---------------------------------------------------------------------------------------------------


@contextmanager
def _bound(task: Any) -> Iterator[None]:
    """This thread is the task's, as long as it lasts."""
    outer_hooks = [(connection, connection.run_on_commit) for connection in task.borrowed]
    for connection in task.borrowed:
        connection.run_on_commit = []
    task.bind()
    try:
        yield
    finally:
        callbacks.guard(None)
        handling.set(None)
        unwatch_thread()
        for connection, hooks in outer_hooks:
            if connection.in_atomic_block:
                connection.run_on_commit = hooks


@contextmanager
def _subscribed(state: QueueState) -> Iterator[None]:
    """A row for it where there is nothing without one: a share of the messages, a barrier, what is sent and kept."""
    queue, alias, delivery = state.queue, state.alias, state.queue.delivery
    if not (delivery.dispatches or delivery.keeps_in_flight or state.barriers is not None):
        yield
        return
    rows = Subscriber.objects.using(alias)
    rows.create(
        id=state.subscriber,
        queue=queue._meta.label,
        table=queue._meta.db_table,
        host=socket.gethostname()[:255],
        process=os.getpid(),
        supervisor=state.subscriber,
        alive_until=Now() + _ALIVE,
        backlog=1,
        at_most_once=delivery.keeps_in_flight,
        consumers=json.dumps([(registration.name, registration.type_name) for registration in registered.of(queue)]),
    )
    try:
        yield
    finally:
        connection = connections[alias]
        if connection.is_usable():
            while (
                delivery.counts_leases
                and state.sql.maintenance.release_owner(connection, state.subscriber, _FEW, started=True) > 0
            ):
                pass
            rows.filter(pk=state.subscriber).delete()
            barriers.forget_subscriber(alias, state.subscriber)


@contextmanager
def _watched(task: Any, handlers: HandlerTable) -> Iterator[None]:
    """Time limits hold here as well."""
    if not handlers.have_limits:
        yield
        return
    watchdog = Watchdog([task])
    watchdog.start()
    try:
        yield
    finally:
        watchdog.stop()


@contextmanager
def _verdicts_of(task: Any) -> Iterator[None]:
    """Record the verdicts of this thread, which are sent as signals."""

    def decided(*, failure: Any, verdict: Any, **_: Any) -> None:
        if threading.get_ident() == task.thread_id:
            task.decided(failure, verdict)

    verdicts = (signals.retry, signals.delayed_retry, signals.poisoned, signals.discarded)
    for signal in verdicts:
        signal.connect(decided, weak=False)
    try:
        yield
    finally:
        for signal in verdicts:
            signal.disconnect(decided)
