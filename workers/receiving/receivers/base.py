"""What the receive strategies share: calling a handler, and what happens when it fails.

A task is one thread with one connection. No lock, timer or log line per message: a task writes two attributes, and the
watchdog looks at ``Receiver.running``. Where code of the user's runs that is no handler it looks at ``Receiver.aside``.
"""

from __future__ import annotations

import logging
import sys
import threading
from asyncio import _get_running_loop, _set_running_loop
from collections.abc import Callable
from contextvars import Context as Variables
from contextvars import copy_context
from datetime import timedelta
from time import monotonic
from typing import Any, TypeVar

import msgspec
from django.db import connections

from queueapp import callbacks, messages
from queueapp.conf import settings
from queueapp.consuming.batch_context import BatchContext
from queueapp.consuming.context import Context, Receiving
from queueapp.consuming.current_message import handling
from queueapp.errors import MessageCancelled, NoCheckpoint, UndecodableMessage
from queueapp.failures import limits
from queueapp.messages.ids import as_uuid
from queueapp.services.connection_timeouts import pause_deadline, resume_deadline
from queueapp.sql import QueueSql
from queueapp.sql.claims import BODY, DELIVERIES, HEADERS, ID, SEQ, Claimed

from ...connections.handed_out import HandedOut
from .. import fork_guard
from ..batch_sizer import BatchSizer
from ..handlers import BoundConsumer, HandlerTable, Interrupted, TimeLimitExceeded, WorkerStopped
from ..queue_state import QueueState
from ..slot import Slot
from .in_hand import TakesInHand

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


class HandlerRoute(msgspec.Struct, frozen=True, eq=False):
    """Where messages with these headers go."""

    headers: str
    entry: BoundConsumer
    #: Reads the usual body, and raises for any other.
    decode: Callable[[bytes], Any] | None
    #: Reads any, or says what is wrong.
    read: messages.Read
    receiving: Receiving


class ActiveCallback(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Code of the user's that is no handler and runs now (``queueapp.callbacks``), for the watchdog."""

    what: str
    seq: int
    #: Whether what becomes of the message is decided.
    outcome_final: bool
    started: float
    deadline: float | None


class Rollback(Exception):
    """Leaves the receive's transaction without a commit; what failed is kept beside it."""


class Receiver(TakesInHand):
    """What the three strategies share."""

    def __init__(self, state: QueueState, slot: Slot | None) -> None:
        super().__init__(slot, state.quarantine)
        self.state = state
        self.queue: Any = state.queue
        self.alias: str = state.alias
        self.handlers: HandlerTable = state.handlers
        self._route: HandlerRoute | None = None
        self._keeps_counts = self.sql.table.keeps_counts
        self.thread_id = 0
        self.active_handler: ActiveHandler | None = None
        self.active_callback: ActiveCallback | None = None
        #: The message that the next ``aside`` is of.
        self.about: Claimed | None = None
        self.batch: Any = None
        self.interrupt_lock = threading.Lock()
        #: What the watchdog has interrupted, for its time limit and for a stop that could not wait.
        self.interrupted_for_timeout: ActiveHandler | ActiveCallback | None = None
        self.interrupted_for_shutdown: ActiveHandler | ActiveCallback | None = None
        #: An ``aside`` was struck, perhaps between an answer of a server and the driver's notes of it.
        self._struck = False
        self.hard_stop = False
        #: What the handler that failed last had left in ``Context.items``.
        self.items: dict[str, Any] | None = None
        #: The context variables of the last handler, and those that ``aside`` runs in when it is a hook after its commit.
        self.variables: Variables | None = None
        self.around: Variables | None = None
        #: The session in which the last handler ran is gone, and with it what it held.
        self.cut_loose = False
        #: See ``InFlightLimit``: places that a claim under way has taken.
        self.reserved = 0
        self._filter = state.filter
        #: What is left of the share that the pump called it for, and since when; the pump's business.
        self.share, self.share_at = 0, 0.0
        self.size = BatchSizer(1, settings.BATCH_TARGET.total_seconds())
        #: Whether the last claim got all that it asked for, so that there may be more.
        self.full = False

    @property
    def sql(self) -> QueueSql:
        """The statements of the queue."""
        return self.state.sql

    def bind(self) -> None:
        """Called on the task's own thread, before anything else."""
        self.thread_id = threading.get_ident()
        self._generation = fork_guard.generation
        self.handed = HandedOut(self.alias)
        handling.set(self)
        callbacks.guard(self.run_aside)

    def receive(self, limit: int) -> int:
        """Claim at most ``limit``, handle them, end them; returns how many were claimed, and leaves ``full`` behind."""
        raise NotImplementedError

    def in_flight_count(self) -> int:
        """Messages of its leased batch that have not ended."""
        return 0

    def call_barrier(self, claimed: Claimed) -> BaseException | bool | None:
        """As ``call``, for a barrier: it is gone already."""
        return self.call(claimed, leased=True)

    @property
    def most(self) -> int:
        """How many messages it is worth being called for at once."""
        return self.size.n

    def stands(self, seq: int) -> bool:
        """Whether the transaction that a handler leaves behind is still the one that it was given: where it took the message."""
        return True

    # -- one message ----------------------------------------------------------------------------------------------

    def call(self, claimed: Claimed, *, leased: bool = False) -> BaseException | bool | None:
        """Run the handler of a message. None: done. False: nobody here knows the type, or the filter does not let it pass. Else
        what it raised. ``leased``: this hand-out is counted in its deliveries."""
        self.cut_loose = False
        attempt, suspect = 1, False
        before = claimed[DELIVERIES] - leased
        if before > 0 or not self._keeps_counts:
            attempt = limits.attempt_of(claimed, keeps_counts=self._keeps_counts)
            suspicion_level = limits.suspicion_level(claimed, attempt, leased=leased, keeps_counts=self._keeps_counts)
            suspect = suspicion_level > 1
        # ``begin`` and ``end``, written out: with the calls ``drain`` was 1.56, without them 1.72 and 1.77.
        suspects, slot, seq = self._suspects, self.slot, claimed[SEQ]
        self.inside = True
        if suspect or suspects.wanted:
            suspects.enter(self, suspect)
        try:
            if slot is not None:
                slot.begin(seq)
            if self._filter is not None and not self._filter.passes(claimed[HEADERS], claimed[BODY]):
                return False
            try:
                route = self._route
                if route is None or claimed[HEADERS] != route.headers:
                    route = self._find(claimed)
                    # A consumer of several is not called here: its class was imported since it was asked for a moment ago.
                    if route is None or route.entry.batch:
                        return False
                entry, body, decode = route.entry, claimed[BODY], route.decode
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
            if before > 0 or not self._keeps_counts:
                exhausted = limits.check_limits(claimed, attempt, entry.attempts, self.queue.delivery, leased=leased)
                if exhausted is not None:
                    self.items = None
                    return exhausted
                attempt += limits.unacknowledged_deliveries(claimed, attempt, leased=leased)
            return self.run(entry, message, Context(route.receiving, claimed, attempt), seq)
        finally:
            if slot is not None:
                slot.end()
            self.inside = False
            if suspects.wanted:
                suspects.leave(suspect)

    def run(
        self, entry: BoundConsumer, message: Any, context: Context | BatchContext, seq: int
    ) -> BaseException | None:
        """Call a handler with what is in hand: None when it has ended well, else what it raised or left behind."""
        started = monotonic()
        timeout = entry.timeout
        handed = self.handed
        failed: BaseException | None = None
        try:
            if not handed.fresh:
                handed.before()
            self.variables = variables = copy_context()
            self.active_handler = running = ActiveHandler(
                seq, entry, context, started, started + timeout if timeout else None
            )
            try:
                # In a copy of the thread's context variables (0.04 µs), or the language, time zone and tracing of one message would
                # be those of the next.
                variables.run(entry.call, message, context)  # type: ignore[arg-type]
            except BaseException as error:
                # sys.exit() and a cancelled coroutine, too, end the attempt and not the worker.
                failed = error
            finally:
                self.active_handler = None
            if fork_guard.generation != self._generation:
                fork_guard.end_child(failed)
            if _recursion_limit() < _RECURSION_LIMIT:
                sys.setrecursionlimit(_RECURSION_LIMIT)  # of the whole process, the engine's own calls among it
            if (
                self.hard_stop
                or (running.deadline is not None and monotonic() >= running.deadline)
                or context._asked is not None
            ):
                self._absorb(running)
        except Interrupted as error:
            # Sent while the handler ran, delivered after it had returned, here or in ``_absorb``: it was late all the same.
            self.active_handler = None
            failed = error
        # Nothing can strike any more.
        if _get_running_loop() is not None:
            # Of a handler, perhaps struck while its loop came to its end: Django would refuse the thread for ever.
            _set_running_loop(None)
        if (
            failed is None
            and handed.fresh
            and self.interrupted_for_timeout is not running
            and self.interrupted_for_shutdown is not running
            and handed.is_untouched()
        ):
            return None
        return self._judge(running, failed)

    def _judge(self, running: ActiveHandler, failed: BaseException | None) -> BaseException | None:
        """After a handler: what it raised or left behind. What it made of its connections is looked at on every alias."""
        handed, name = self.handed, running.consumer.registration.name
        left = handed.after(failed, self.stands, running.seq)
        self.cut_loose = left is not None and left.replaced
        if handed.changed is not None:
            self.state.tell_changed(name, handed.changed)
        if (self.interrupted_for_timeout is running or self.interrupted_for_shutdown is running) and not connections[
            self.alias
        ].in_atomic_block:
            handed.replace()  # it may have struck between an answer and the driver's notes of it
        failed = failed or left
        if failed is not None:
            if running.context._asked is not None:
                failed = _cancelled(running.context._asked, failed)  # whatever the handler made of being asked
            elif self.interrupted_for_shutdown is running and self.interrupted_for_timeout is not running:
                # Whatever the handler made of the interruption.
                failed = WorkerStopped(f"{name} was interrupted: the worker stops.")
            self.items = running.context._items
        return failed

    def _find(self, claimed: Claimed) -> HandlerRoute | None:
        """Who handles this message; remembered for the next ones, most of which are of the same type and have no headers of
        their own. None: nobody here. Raises UndecodableMessage."""
        entry, kind = self.handlers.find(claimed)
        if entry is None:
            return None
        receiving = Receiving(self.queue, self.alias, entry.registration, self.extend, self.write_headers)
        decode, read = entry.reader(kind)
        route = HandlerRoute(claimed[HEADERS], entry, decode, read, receiving)
        if not self.handlers.addressed or self.handlers.finder is not None:
            self._route = route
        return route

    def _absorb(self, running: ActiveHandler | ActiveCallback) -> None:
        """If the watchdog has sent an exception, it is raised in here or was raised before, and nowhere else."""
        with self.interrupt_lock:
            sent = self.interrupted_for_timeout is running or self.interrupted_for_shutdown is running
        if sent:
            for _ in range(100):  # what is still under way is raised at a jump back; else the handler has had it
                pass

    # -- code of the user's that is no handler -----------------------------------------------------------------------

    def run_aside(self, what: str, call: Callable[[], _T], *, outcome_final: bool) -> _T:
        """Call it within the time limit of its message's consumer; each for itself, since one that hangs is not to cost the next
        its time. Raises Interrupted when it is over that, whatever it made of the interruption."""
        claimed = self.about
        if claimed is None or self.active_handler is not None or self.active_callback is not None:
            return call()  # in a handler, or in another one: watched as that
        entry = self._entry_of(claimed)
        timeout = entry.timeout if entry is not None else settings.TIMEOUT and settings.TIMEOUT.total_seconds()
        if entry is not None:
            what = f"{what} of {entry.registration.name}"
        paused = pause_deadline()
        started = monotonic()
        aside = ActiveCallback(what, claimed[SEQ], outcome_final, started, started + timeout if timeout else None)
        failed: BaseException | None = None
        try:
            try:
                self.active_callback = aside
                returned = (self.around or copy_context()).run(call)
            except BaseException as error:
                failed = error
            finally:
                self.active_callback = None
            if fork_guard.generation != self._generation:
                fork_guard.end_child(failed)
            if self.hard_stop or (aside.deadline is not None and monotonic() >= aside.deadline):
                self._absorb(aside)
        except Interrupted as error:
            # As in ``call``: it is late, and nothing else.
            self.active_callback = None
            failed = error
        resume_deadline(paused)
        if self.interrupted_for_timeout is aside or self.interrupted_for_shutdown is aside:
            self._struck = True
            if not isinstance(failed, Interrupted):
                failed = (TimeLimitExceeded if self.interrupted_for_timeout is aside else WorkerStopped)(
                    f"{what} was interrupted"
                )
        if failed is not None:
            raise failed
        return returned

    def mend(self) -> None:
        """After asides: see ``HandedOut.mend``."""
        self.around = None
        if self._struck:
            self._struck = False
            self.handed.replace()
        else:
            self.handed.mend()

    def _entry_of(self, claimed: Claimed) -> BoundConsumer | None:
        try:
            return self.handlers.find(claimed)[0]
        except UndecodableMessage:
            return None

    def consumer_of(self, claimed: Claimed) -> Any:
        """The registration that a message belongs to, for recoverability; None when its headers do not parse."""
        entry = self._entry_of(claimed)
        return entry.registration if entry else None

    def extend(self, seq: int, period: timedelta | None) -> None:
        """``Context.extend``; only a leased message has something to extend."""

    def write_headers(self, seq: int, headers: str) -> None:
        """``Context.checkpoint``."""
        raise NoCheckpoint(self.queue._meta.label, self.queue.delivery.semantics.name)


def _cancelled(asked: MessageCancelled, failed: BaseException) -> MessageCancelled:
    error = MessageCancelled(asked.reason, discard=asked.discard)
    error.__cause__ = failed
    return error
