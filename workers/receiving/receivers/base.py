"""What the receivers of all semantics share: calling a handler under the guards, what happens when it fails, and
interrupting it from outside.

A receiver is one thread with one connection. There is no lock, timer or log line per message: a receiver writes two
attributes, and the watchdog reads ``Receiver.active_handler``. While a callback of the user runs (an on_commit hook, a
policy, a signal receiver), the watchdog reads ``Receiver.active_callback``.

    idle --claim--> reading a message --> in its handler --returned--> ended
                                                         --raised, late, left its connection unclean--> failed

Before a message is read, the receiver records it in its slot, since reading it may end the process as well as its
handler may.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import sys
import threading
import traceback
from asyncio import _get_running_loop, _set_running_loop
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import Context as Variables
from contextvars import copy_context
from datetime import timedelta
from time import monotonic
from typing import Any, NoReturn, TypeVar

import msgspec
from django.db import connections

from queueapp import callbacks, messages
from queueapp.conf import settings
from queueapp.consuming.context import BatchContext, Context, Receiving, handling
from queueapp.errors import MessageCancelled, NoCheckpoint, UndecodableMessage
from queueapp.failures import limits
from queueapp.flow import workflow
from queueapp.messages.ids import as_uuid
from queueapp.services.connection_timeouts import pause_deadline, resume_deadline
from queueapp.sql import QueueSql
from queueapp.sql.claims import BODY, DELIVERIES, HEADERS, ID, SEQ, Claimed

from ...connections.connection_guard import ConnectionGuard
from ..events import InFlightSlot
from ..handlers import BoundConsumer, Cancelled, HandlerTable, Interrupted, TimeLimitExceeded, WorkerStopped
from ..limits import BatchSizer
from ..queue_state import QueueState

log = logging.getLogger("queueapp.workers")
_T = TypeVar("_T")
_recursion_limit = sys.getrecursionlimit
_RECURSION_LIMIT = _recursion_limit()


class ActiveHandler(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The handler that runs now, for the watchdog. (One is made per message: 0.1 µs where a NamedTuple takes 0.3.)"""

    seq: int
    consumer: BoundConsumer
    context: Context | BatchContext
    started: float
    deadline: float | None


class ActiveCallback(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The callback that runs now (``queueapp.callbacks``), for the watchdog."""

    what: str
    seq: int
    #: Whether the outcome of the message no longer depends on it.
    outcome_final: bool
    started: float
    deadline: float | None


class HandlerRoute(msgspec.Struct, frozen=True, eq=False):
    """Which consumer takes messages with these headers, and how their bodies are decoded."""

    headers: str
    consumer: BoundConsumer
    #: Decodes the usual body, and raises for any other.
    decode: Callable[[bytes], Any] | None
    #: Decodes any body, or raises UndecodableMessage.
    read: messages.Read
    receiving: Receiving


class Rollback(Exception):
    """Leaves the receive's transaction without a commit. What failed is kept elsewhere."""


class Receiver:
    """One receiver thread of a queue."""

    #: Whether a claim for a consumer of batches may wait for more messages (``batch_wait``).
    may_gather = True

    def __init__(self, state: QueueState, slot: InFlightSlot | None) -> None:
        self.state = state
        self.slot = slot
        self.queue: Any = state.queue
        self.alias: str = state.alias
        self.handlers: HandlerTable = state.handlers
        self._quarantine = state.quarantine
        #: Its handler runs or is about to; see ``Quarantine``.
        self.inside = False
        self._route: HandlerRoute | None = None
        #: The headers of the last message that has a consumer here, if all messages with the same ones have it too.
        self.known_headers: str | None = None
        self.keeps_counts = self.sql.table.keeps_counts
        self.thread_id = 0
        self.active_handler: ActiveHandler | None = None
        self.active_callback: ActiveCallback | None = None
        #: The message of the next callback.
        self.callback_message: Claimed | None = None
        #: The batch that it has leased; see ``LeasedBatch``.
        self.batch: Any = None
        self.interrupt_lock = threading.Lock()
        #: What the watchdog has interrupted: for its time limit, and for a stop that could not wait.
        self.interrupted_for_timeout: ActiveHandler | ActiveCallback | None = None
        self.interrupted_for_shutdown: ActiveHandler | ActiveCallback | None = None
        #: A callback was interrupted, perhaps between an answer of the server and the driver's processing of it.
        self._callback_interrupted = False
        self.hard_stop = False
        #: What the handler that failed last had left in ``Context.items``.
        self.items: dict[str, Any] | None = None
        #: The context variables of the last handler, and those of the next callback if it is a hook after its commit.
        self.handler_variables: Variables | None = None
        self.callback_variables: Variables | None = None
        #: The session in which the last handler ran is gone, and with it the locks that it held.
        self.session_lost = False
        #: Capacity that an active claim has taken; see ``InFlightLimit``.
        self.reserved = 0
        self.filter = state.filter
        #: What remains of the share that the pump called it for, and since when. Written by the pump.
        self.share, self.share_at = 0, 0.0
        self.size = BatchSizer(1, settings.BATCH_TARGET.total_seconds())
        #: Whether the last claim got all that it asked for, so that there may be more.
        self.full = False
        #: Calls the consumers that take batches; None: there are none.
        self.batches: Any = None

    @property
    def sql(self) -> QueueSql:
        """The statements of the queue."""
        return self.state.sql

    def bind(self) -> None:
        """Called on the receiver's own thread, before anything else."""
        self.thread_id = threading.get_ident()
        self._generation = generation
        self.guard = ConnectionGuard(self.alias)
        handling.set(self)
        callbacks.guard(self.run_callback)

    def receive(self, limit: int) -> int:
        """Claim at most ``limit`` messages, handle and end them; return how many were claimed, and set ``full``."""
        raise NotImplementedError

    def in_flight_count(self) -> int:
        """Messages of its leased batch that have not ended."""
        batch = self.batch
        return 0 if batch is None else len(batch.leased())

    def call_barrier(self, claimed: Claimed) -> BaseException | bool | None:
        """Like ``call``, for a barrier, which is already gone."""
        return self.call(claimed, leased=True)

    @property
    def max_batch(self) -> int:
        """How many messages it is worth calling it for at once."""
        return self.size.n

    def transaction_intact(self, seq: int) -> bool:
        """Whether the transaction that a handler leaves is still the one in which its message was claimed."""
        return True

    # -- one message ----------------------------------------------------------------------------------------------

    def call(self, claimed: Claimed, *, leased: bool = False) -> BaseException | bool | None:
        """Run the handler of a message. None: done. False: no consumer here takes it, or the filter does not match.
        Else what it raised. ``leased``: this delivery is counted in the row."""
        if self.batches is not None and (route := self.batches.route_of(claimed)) is not None:
            return self.batches.call_one(route, claimed, leased=leased)  # type: ignore[no-any-return]
        self.session_lost = False
        attempt, quarantined = 1, False
        before = claimed[DELIVERIES] - leased
        if before > 0 or not self.keeps_counts:
            attempt = limits.attempt_of(claimed, keeps_counts=self.keeps_counts)
            suspicion = limits.suspicion_level(claimed, attempt, leased=leased, keeps_counts=self.keeps_counts)
            quarantined = suspicion > 1
        # ``begin`` and ``end``, written out: with the calls ``drain`` was 1.56, without them 1.72 and 1.77.
        quarantine, slot, seq = self._quarantine, self.slot, claimed[SEQ]
        self.inside = True
        if quarantined or quarantine.wanted:
            quarantine.enter(self, quarantined)
        try:
            if slot is not None:
                slot.begin(seq)
            if self.filter is not None and not self.filter.passes(claimed[HEADERS], claimed[BODY]):
                return False
            try:
                route = self._route
                if route is None or claimed[HEADERS] != route.headers:
                    route = self.find_route(claimed)
                    # A consumer of batches is not called here: its class was imported since ``batches`` was asked a
                    # moment ago.
                    if route is None or route.consumer.batch:
                        return False
                consumer, body, decode = route.consumer, claimed[BODY], route.decode
                try:
                    message = decode(body) if decode is not None and body else None
                except Exception:  # not this type, or a byte order mark
                    message = None
                if message is None:
                    message = route.read(body, claimed[HEADERS], as_uuid(claimed[ID]), self.alias)
            except BaseException as error:
                # UndecodableMessage; or sys.exit() where an instance of the user's class is made.
                self.items = None
                return error
            if before > 0 or not self.keeps_counts:
                exhausted = limits.check_limits(claimed, attempt, consumer.attempts, self.queue.delivery, leased=leased)
                if exhausted is not None:
                    self.items = None
                    return exhausted
                attempt += limits.unacknowledged_deliveries(claimed, attempt, leased=leased)
            return self.run(consumer, message, Context(route.receiving, claimed, attempt), seq)
        finally:
            if slot is not None:
                slot.end()
            self.inside = False
            if quarantine.wanted:
                quarantine.leave(quarantined)

    def run(
        self, consumer: BoundConsumer, message: Any, context: Context | BatchContext, seq: int
    ) -> BaseException | None:
        """Call a handler: None when it has ended well, else what it raised or left behind."""
        started = monotonic()
        timeout = consumer.timeout
        guard = self.guard
        failed: BaseException | None = None
        try:
            if not guard.fresh:
                guard.before()
            self.handler_variables = variables = copy_context()
            self.active_handler = active = ActiveHandler(
                seq, consumer, context, started, started + timeout if timeout else None
            )
            try:
                # In a copy of the thread's context variables (0.04 µs), or the language, time zone and tracing of one
                # message would be those of the next.
                variables.run(consumer.call, message, context)  # type: ignore[arg-type]
            except BaseException as error:
                # sys.exit() and a cancelled coroutine, too, end the attempt and not the worker.
                failed = error
            finally:
                self.active_handler = None
            if generation != self._generation:
                end_child(failed)
            if _recursion_limit() < _RECURSION_LIMIT:
                sys.setrecursionlimit(_RECURSION_LIMIT)  # of the whole process, the engine's own calls included
            if (
                self.hard_stop
                or (active.deadline is not None and monotonic() >= active.deadline)
                or context._asked is not None
            ):
                self._absorb(active)
        except Interrupted as error:
            # Sent while the handler ran, delivered after it had returned, here or in ``_absorb``: it was late all the
            # same.
            self.active_handler = None
            failed = error
        # From here on no interruption can arrive.
        self.state.health.durations.append(monotonic() - started)
        if _get_running_loop() is not None:
            # Of a handler, perhaps interrupted while its loop came to its end: Django would refuse the thread for ever.
            _set_running_loop(None)
        if (
            failed is None
            and guard.fresh
            and self.interrupted_for_timeout is not active
            and self.interrupted_for_shutdown is not active
            and guard.is_clean()
        ):
            return None
        return self._judge(active, failed)

    def _judge(self, active: ActiveHandler, failed: BaseException | None) -> BaseException | None:
        """After a handler: what it raised or left behind. Its connections are checked on every alias."""
        guard, name = self.guard, active.consumer.registration.name
        interrupted = self.interrupted_for_timeout is active or self.interrupted_for_shutdown is active
        leaked = guard.after(failed, self.transaction_intact, active.seq)
        self.session_lost = leaked is not None and leaked.replaced
        if guard.changed is not None:
            self.state.health.warn_session_changed(name, guard.changed)
        if interrupted and not connections[self.alias].in_atomic_block:
            guard.replace()  # perhaps interrupted between an answer of the server and the driver's processing of it
        failed = failed or leaked
        if failed is not None:
            if active.context._asked is not None:
                failed = _cancelled(active.context._asked, failed)  # whatever the handler made of the request
            elif self.interrupted_for_shutdown is active and self.interrupted_for_timeout is not active:
                # Whatever the handler made of the interruption.
                failed = WorkerStopped(f"{name} was interrupted: the worker stops.")
            self.items = active.context._items
        return failed

    def find_route(self, claimed: Claimed) -> HandlerRoute | None:
        """The consumer of this message; remembered for the next ones, most of which are of the same type and have no
        headers of their own. None: there is none here. Raises UndecodableMessage."""
        consumer, kind = self.handlers.find(claimed)
        if consumer is None:
            return None
        if self.sql.table.has_workflow and workflow.has_workflow(claimed[HEADERS]):
            consumer = self._for_workflow(consumer, claimed)
        receiving = Receiving(self.queue, self.alias, consumer.registration, self.extend, self.write_headers)
        decode, read = consumer.reader(kind)
        route = HandlerRoute(claimed[HEADERS], consumer, decode, read, receiving)
        if not self.handlers.addressed or self.handlers.resolver is not None:
            self.known_headers = route.headers
            if not consumer.batch:
                self._route = route
        return route

    @staticmethod
    def _for_workflow(consumer: BoundConsumer, claimed: Claimed) -> BoundConsumer:
        """The consumer of a message whose ack brings about more. Raises UndecodableMessage before the handler is
        called, so that what cannot be done makes the message poison."""
        keeps = workflow.read(claimed[HEADERS]).keep_result is not None
        return consumer.keeping_result() if keeps and not consumer.batch else consumer

    def _absorb(self, active: ActiveHandler | ActiveCallback) -> None:
        """If the watchdog has sent an exception, it is raised in here or was raised before, and nowhere else."""
        with self.interrupt_lock:
            sent = self.interrupted_for_timeout is active or self.interrupted_for_shutdown is active
        if sent:
            for _ in range(100):  # a pending exception is raised at a jump back; else the handler has had it
                pass

    # -- the message in flight ----------------------------------------------------------------------------------------

    @contextmanager
    def only_here(self) -> Iterator[None]:
        """What is claimed in here is in no table until it was handled. Recorded from before the claim, so that an
        observer who sees the table empty sees this."""
        if self.slot is None:
            yield
            return
        self.slot.only_here(True)
        try:
            yield
        finally:
            self.slot.only_here(False)

    def begin(self, seq: int, quarantined: bool) -> None:
        """A message is in flight until ``end``: what reads it (a codec, a class of the user's) may end the process as
        well as its handler may. Waits for its turn first: one that waited in flight would be counted with the
        message that ended the process."""
        quarantine = self._quarantine
        self.inside = True
        if quarantined or quarantine.wanted:
            quarantine.enter(self, quarantined)
        if self.slot is not None:
            self.slot.begin(seq)

    def end(self, quarantined: bool) -> None:
        """The message is no longer in flight."""
        if self.slot is not None:
            self.slot.end()
        self.inside = False
        quarantine = self._quarantine
        if quarantine.wanted:
            quarantine.leave(quarantined)

    @contextmanager
    def in_flight(self, seqs: Sequence[int], quarantined: bool) -> Iterator[None]:
        """From ``begin`` to ``end``, for messages of one call: any of them may be the cause of a crash."""
        several = self.slot if len(seqs) > 1 else None
        if several is not None:
            several.several(seqs)
        try:
            self.begin(seqs[0], quarantined)
            yield
        finally:
            self.end(quarantined)
            if several is not None:
                several.several(())

    # -- callbacks ----------------------------------------------------------------------------------------------------

    def run_callback(self, what: str, call: Callable[[], _T], *, outcome_final: bool) -> _T:
        """Call it within the time limit of its message's consumer; each callback has the whole limit, so that one that
        hangs does not cost the next its time. Raises Interrupted when it exceeds that, whatever it made of the
        interruption."""
        claimed = self.callback_message
        if claimed is None or self.active_handler is not None or self.active_callback is not None:
            return call()  # in a handler, or in another callback: watched as that
        consumer = self.bound_consumer_of(claimed)
        timeout = consumer.timeout if consumer is not None else settings.TIMEOUT and settings.TIMEOUT.total_seconds()
        if consumer is not None:
            what = f"{what} of {consumer.registration.name}"
        paused = pause_deadline()
        started = monotonic()
        active = ActiveCallback(what, claimed[SEQ], outcome_final, started, started + timeout if timeout else None)
        failed: BaseException | None = None
        try:
            try:
                self.active_callback = active
                returned = (self.callback_variables or copy_context()).run(call)
            except BaseException as error:
                failed = error
            finally:
                self.active_callback = None
            if generation != self._generation:
                end_child(failed)
            if self.hard_stop or (active.deadline is not None and monotonic() >= active.deadline):
                self._absorb(active)
        except Interrupted as error:
            # As in ``run``: it is late, and nothing else.
            self.active_callback = None
            failed = error
        resume_deadline(paused)
        late = self.interrupted_for_timeout is active
        if late or self.interrupted_for_shutdown is active:
            self._callback_interrupted = True
            if not isinstance(failed, Interrupted):
                failed = (TimeLimitExceeded if late else WorkerStopped)(f"{what} was interrupted")
        if failed is not None:
            raise failed
        return returned

    def restore_connection(self) -> None:
        """After callbacks: see ``ConnectionGuard.restore``."""
        self.callback_variables = None
        if self._callback_interrupted:
            self._callback_interrupted = False
            self.guard.replace()
        else:
            self.guard.restore()

    def bound_consumer_of(self, claimed: Claimed) -> BoundConsumer | None:
        """The consumer of a message; None where there is none, or its headers do not parse."""
        try:
            return self.handlers.find(claimed)[0]
        except UndecodableMessage:
            return None

    def consumer_of(self, claimed: Claimed) -> Any:
        """The registration of its consumer, for recoverability; None where there is none, or its headers do not
        parse."""
        consumer = self.bound_consumer_of(claimed)
        return consumer.registration if consumer else None

    # -- for contexts of handlers -------------------------------------------------------------------------------------

    def extend(self, seq: int, period: timedelta | None) -> None:
        """``Context.extend``; only a leased message has a lease to extend."""

    def extend_batch(self, seqs: Sequence[int], period: timedelta | None) -> None:
        """``BatchContext.extend``; only leased messages have a lease to extend."""

    def write_headers(self, seq: int, headers: str) -> None:
        """``Context.checkpoint``."""
        raise NoCheckpoint(self.queue._meta.label, self.queue.delivery.semantics.name)


def _cancelled(request: MessageCancelled, failed: BaseException) -> MessageCancelled:
    error = MessageCancelled(request.reason, discard=request.discard)
    error.__cause__ = failed
    return error


#: How many forks this process is away from its first ancestor that imported this.
generation = 0


def _is_a_child() -> None:
    global generation
    generation += 1


os.register_at_fork(after_in_child=_is_a_child)


def end_child(failed: BaseException | None) -> NoReturn:
    """End this process as Python would have, but for what belongs to the parent: nothing of that is closed or
    notified."""
    code: object = 0
    if isinstance(failed, SystemExit):
        code = 0 if failed.code is None else failed.code
    elif failed is not None:
        code = 1
        traceback.print_exception(failed)
    with contextlib.suppress(Exception):
        if not isinstance(code, int):
            sys.stderr.write(f"{code}\n")
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code & 0xFF if isinstance(code, int) else 1)


def cancel(receiver: Receiver, active: ActiveHandler) -> bool:
    """Stop a handler that an operator cancelled: what is awaited is cancelled, another handler gets ``Cancelled`` in
    its thread. False: not possible yet, because what is to be awaited has not begun."""
    with receiver.interrupt_lock:
        if (
            receiver.active_handler is not active
            or receiver.interrupted_for_timeout is active
            or receiver.interrupted_for_shutdown is active
        ):
            return True
        if (stop := active.context._cancel) is not None:
            cancel_awaited(stop)
        elif active.consumer.registration.is_async:
            return False
        else:
            receiver.interrupted_for_timeout = active
            raise_in_thread(receiver, Cancelled)
        return True


def cancel_awaited(cancel: Callable[..., object], **options: Any) -> None:
    """Cancel what a handler awaits."""
    with contextlib.suppress(RuntimeError):  # its event loop is closed: the handler has just ended
        cancel(**options)


def raise_in_thread(receiver: Receiver, exception: type[Interrupted]) -> None:
    """Raise in the receiver's thread, between two bytecodes."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(receiver.thread_id), ctypes.py_object(exception))
