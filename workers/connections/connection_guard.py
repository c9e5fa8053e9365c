"""After every handler: are the connections of its thread as they were before it?

A handler is code of the project on the worker's own connection. What it leaves behind there would roll back the next
ack without an error, or make every claim of the thread fail; what it leaves on another alias would fail the messages
that follow. So a receiver asks ``ConnectionGuard`` before and after each handler. While all is well a pair of calls
costs no round trip and, within a batch, 0.2 µs, in a transaction 1.2 µs, and 3.5 µs on a thread whose handlers have
opened another alias (PostgreSQL, CPU time). docs/explanation/connection-guard.md says what is checked and why.

A handler that has changed its session for good (``SET search_path``, ``SET ROLE``, a time-out;
``SessionChangeDetector`` says how that is known) has not failed, but the next handler gets another session. So does the
one after a statement that was refused, which may be the effect of a change that was not detected.

Not detected, because neither Django nor the driver reports them:

* of such changes those made past Django's cursors, or in a function, where the server does not report them by itself;
  cursors WITH HOLD of the driver;
* a transaction that raw SQL ended and began anew: on PostgreSQL by COMMIT, or with prepared statements turned off; on
  SQL Server without an error that Django flags. The others are suspected: see ``transaction_intact`` of ``after``;
* on SQL Server, BEGIN TRANSACTION in autocommit by a handler that met no error; on databases without queues, what
  Django's own bookkeeping does not show;
* connections that Django does not keep for this thread: of threads that a handler starts, or made with ``copy()``.

A savepoint that ``transaction.savepoint()`` or raw SQL left open needs no check: the commit ends it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from time import monotonic
from typing import Any

from django.db import DataError, Error, IntegrityError, connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.signals import connection_created

from queueapp.errors import UnsupportedServer
from queueapp.sql import Backend, ErrorKind, SessionState, backend_of

_GONE, _BUSY, _FAILED = SessionState.GONE, SessionState.BUSY, SessionState.FAILED
_IDLE, _MANUAL, _IN_TRANSACTION = SessionState.IDLE, SessionState.MANUAL, SessionState.IN_TRANSACTION
#: Characters of a statement that are inspected. Long statements are of many rows or values and show their kind at the
#: beginning; a text that may be several statements is inspected to its end.
_INSPECTED = 1000
#: Seconds without a message after which Django checks a connection again.
_IDLE_SECONDS = 5.0
#: Whether the connections of a thread are watched.
_thread = threading.local()


class LeakedState(Exception):
    """An attempt has failed although its handler returned: what it did cannot be committed, or would harm what follows.

    The text says what the handler did and what to do instead. An error that it had swallowed is the ``__cause__``.
    """

    def __init__(self, reasons: list[str], *, replaced: bool) -> None:
        super().__init__(" ".join(reasons))
        self.reasons = reasons
        #: The receiver's own session is closed, and with it what it held; the next statement opens another. False: it
        #: is open, and the transaction in which it was handed out can be rolled back in place.
        self.replaced = replaced


class ConnectionGuard:
    """The connections of one thread, made on that thread; ``alias`` is the receiver's own.

    Around each handler: ``before()``, the handler, ``after(failed)``; while ``fresh``, the handler and ``is_clean()``
    are enough, and ``after`` where that says no. ``after`` is called where ``before`` was: inside of the ``atomic``
    that the receiver has opened and before its commit; both only when no exception can arrive from outside. A
    connection that is not usable it closes at once, on every alias, and the server rolls that back.

    A receiver inside of its own ``atomic`` leaves it by an exception of its own (``Rollback``) when ``after`` has
    returned something. If that is ``replaced``, Django's bookkeeping is that of a connection which was closed in a
    transaction: until the end of the block every statement is refused, and the end does no I/O, raises nothing and
    commits nothing. If it is not, the transaction is marked for a rollback, and ``rollback_and_lock`` may be that.

    An interruption from outside (a time limit) may arrive in a driver between a server's answer and the driver's own
    record of it, which cannot be detected. Outside of ``atomic`` a receiver calls ``replace()`` after each.
    """

    __slots__ = (
        "_autocommit",
        "_backend",
        "_blocks",
        "_by_alias",
        "_connection",
        "_detector",
        "_in_atomic",
        "_mark",
        "_other_aliases",
        "_raw",
        "_savepoints",
        "_session_state",
        "_settings",
        "_settings_of",
        "_state",
        "alias",
        "changed",
        "fresh",
        "stale",
    )  # fmt: skip

    def __init__(self, alias: str) -> None:
        self.alias = alias
        self._connection: Any = connections[alias]
        self._backend: Backend = backend_of(self._connection)
        self._by_alias: Any = connections_by_alias()
        watch_thread()
        self._other_aliases = OtherAliases(self._connection)
        detector = detector_of(self._connection)
        assert detector is not None
        self._detector: SessionChangeDetector = detector
        #: The statement by which the last handler has changed its session for good, or ``""`` where the statement is
        #: not known.
        self.changed: str | None = None
        #: The session must not be used by another handler: outside of every ``atomic`` of the receiver, ``restore``
        #: replaces it.
        self.stale = False
        #: The settings of this session, as far as the server reports them.
        self._settings: tuple[Any, ...] = ()
        self._settings_of: Any = None
        # The state before the handler:
        self._raw: Any = None
        #: The last ``after`` found the session unchanged in autocommit, and the thread has no other: the next handler
        #: needs no ``before``, unless the session was used since (``mark_used``).
        self.fresh = False
        self._session_state = self._backend.sessions.state
        self._state = _GONE
        self._autocommit = True
        self._in_atomic = False
        self._blocks: list[Any] = []
        self._savepoints: list[Any] = []
        self._mark: Any = None

    # -- around a handler -------------------------------------------------------------------------------------------

    def before(self) -> None:
        """Record the state before a handler. A session on another alias that is dead, or has something open, is closed,
        so that the handler's first statement there opens another."""
        self.fresh = False
        if self._by_alias is None or len(self._by_alias) > 1:
            self._other_aliases.before()
        connection = self._connection
        if self.stale and not connection.in_atomic_block:
            self.replace()
        state = self._backend.sessions.state(connection)
        self._in_atomic = in_atomic = connection.in_atomic_block
        if in_atomic:
            self._blocks = connection.atomic_blocks[:]
            self._savepoints = connection.savepoint_ids[:]
            self._mark = None if state is _GONE else self._backend.sessions.transaction_mark(connection)
        elif state is _GONE or state is _BUSY or state is _FAILED or connection.needs_rollback:
            # Not usable: better found here than by the handler. A connection not yet opened is reset as well.
            self.replace()
            state = _GONE
        self._raw = raw = connection.connection
        self._detector.reset()
        if raw is not self._settings_of:
            self._settings, self._settings_of = self._backend.sessions.settings(connection), raw
        self._autocommit = connection.autocommit
        # Django keeps the error of an earlier transaction, and would name it as the cause where this handler's
        # statement is refused.
        connection.rollback_exc = None
        self._state = state

    def after(
        self, failed: BaseException | None = None, transaction_intact: Callable[[int], bool] | None = None, seq: int = 0
    ) -> LeakedState | None:
        """Why the attempt has failed although the handler returned; None when the state is as before it.

        ``failed`` is the exception of the handler, which then stays the reason: what the following rollback repairs,
        and other aliases, are not mentioned, so a result is always ``replaced``, with ``failed`` as its ``__cause__``.
        ``transaction_intact(seq)`` says whether the open transaction still holds the message claimed in it. It is
        called, at the cost of its statement, only when the transaction may be another one than before; a database error
        from it counts as no.
        """
        by_alias = self._by_alias
        other_states = self._other_aliases.after(failed) if by_alias is None or len(by_alias) > 1 else []
        self.changed = None
        detector = self._detector
        if detector.ran or self._connection.execute_wrappers != detector.wrappers:
            self._check_session(failed)
        if failed is None and not other_states and not self.stale and self._is_unchanged():
            if not self._in_atomic and by_alias is not None and len(by_alias) == 1 and self._raw is not None:
                self.fresh = True
            else:
                self._raw = None
            return None
        self.fresh = False
        leaked = self._judge(failed, other_states, transaction_intact, seq)
        if self.stale and not self._in_atomic:
            self.replace()
        return leaked

    def is_clean(self) -> bool:
        """While ``fresh``, after a handler that returned: whether nothing has changed, so that the next handler may
        have the same state. Asked for every message of a batch, so it only reads attributes."""
        connection, by_alias = self._connection, self._by_alias
        return not (
            self._detector.ran
            or connection.execute_wrappers != self._detector.wrappers
            or connection.connection is not self._raw
            or connection.in_atomic_block
            or connection.needs_rollback
            or connection.errors_occurred
            or connection.closed_in_transaction
            or connection.savepoint_ids
            or connection.run_on_commit
            or connection.autocommit is not self._autocommit
            or len(by_alias) != 1
            or by_alias.get(self.alias) is not connection
            or self._session_state(connection) is not self._state
        )

    def mark_used(self) -> None:
        """The receiver itself may have used its connection since the last ``after``: the next handler needs
        ``before``."""
        self.fresh = False

    def restore(self) -> None:
        """After a callback (a hook after a commit, a policy, a signal receiver): make sure that the next statement on
        the own alias runs in autocommit. For a receiver outside of every ``atomic`` of its own."""
        self.fresh = False
        connection, detector = self._connection, self._detector
        same = connection.connection is not None and connection.connection is self._settings_of
        if (
            self.stale
            or (same and connection.execute_wrappers != detector.wrappers and detector.restore())
            or detector.statement
            or self._current() is not connection
            or not (
                is_plain(connection, self._backend, ask=False)
                or (connection.connection is None and is_closed(connection))
            )
        ):
            self.replace()

    def replace(self) -> None:
        """Make the own alias usable whatever its state: the session is closed without a statement, and the server rolls
        it back; Django's bookkeeping is that of a connection not yet opened. For a receiver outside of every ``atomic``
        of its own."""
        connection, handed = self._connection, self._raw
        self._raw = None
        self.stale = self.fresh = False
        self._detector.reset()
        intruder = self._current()
        if intruder is not connection:
            connections[self.alias] = connection
            if intruder is not None:
                close(intruder, queue_backend_of(intruder))
        if (
            handed is not None
            and handed is not connection.connection
            # A pool has got it back and may have given it to another thread.
            and not connection.settings_dict["OPTIONS"].get("pool")
        ):
            # Django no longer has it and may not have closed it: it would keep its locks.
            discard(handed, self._backend)
        close(connection, self._backend)

    def _check_session(self, failed: BaseException | None) -> None:
        """After a handler that has run statements: whether the next one may have its session."""
        connection, detector = self._connection, self._detector
        opened = self._raw is None or connection.connection is not self._raw
        leaked = None if opened else detector.restore()
        if detector.statement is not None:
            self.changed = detector.statement
        elif leaked is not None:
            self.changed = leaked
        elif connection.connection is self._settings_of and self._settings != self._backend.sessions.settings(
            connection
        ):
            self.changed = ""
        self.stale = self.changed is not None or (failed is not None and self._was_refused(failed))
        detector.reset()

    def _was_refused(self, failed: BaseException) -> bool:
        """Whether the session may be the cause: a missing privilege or table, a read-only server, a time-out."""
        return (
            isinstance(failed, Error)
            and not isinstance(failed, IntegrityError | DataError)
            and self._backend.error_kind(failed) not in (ErrorKind.DEADLOCK, ErrorKind.LOCKED)
        )

    # -- the own alias ----------------------------------------------------------------------------------------------

    def _is_unchanged(self) -> bool:
        """Whether nothing has changed. Asked for every message, so it only reads attributes."""
        connection = self._connection
        if (
            connection.connection is not self._raw
            or connection.autocommit != self._autocommit
            or connection.in_atomic_block != self._in_atomic
            or connection.needs_rollback
            or connection.errors_occurred
            or connection.closed_in_transaction
            or self._current() is not connection
            or self._backend.sessions.state(connection) is not self._state
        ):
            return False
        if self._in_atomic:
            return (
                connection.savepoint_ids == self._savepoints
                and connection.atomic_blocks == self._blocks
                and not self._backend.sessions.may_be_another_transaction(connection, self._mark)
            )
        return not connection.savepoint_ids and not connection.run_on_commit

    def _judge(
        self,
        failed: BaseException | None,
        reasons: list[str],
        transaction_intact: Callable[[int], bool] | None,
        seq: int,
    ) -> LeakedState | None:
        connection = self._connection
        # Where the driver does not know the state, the server is asked once an error has occurred.
        state = self._backend.sessions.state(connection, ask=failed is not None or connection.errors_occurred)
        swallowed = connection.rollback_exc
        lost = self._lost(state, failed)
        doomed = (
            self._doomed(state, transaction_intact, seq)
            if lost is None and failed is None and self._in_atomic
            else None
        )
        if lost is not None:
            reasons.insert(0, lost)
            self.replace()
            if self._in_atomic:
                # The state that Django gives to a connection that is closed in a transaction, so that the receiver's
                # own blocks end without an error. Except needs_rollback: that would outlive them and refuse the
                # statement that opens a session.
                connection.in_atomic_block = True
                connection.atomic_blocks = self._blocks
                connection.savepoint_ids = self._savepoints
                connection.closed_in_transaction = True
        else:
            self._raw = None
            connection.errors_occurred = False  # it was checked since, and works
            if doomed is not None:
                reasons.insert(0, doomed)
        if not reasons:
            return None
        leaked = LeakedState(reasons, replaced=lost is not None)
        leaked.__cause__ = failed or swallowed
        if self._in_atomic and lost is None:
            connection.needs_rollback = True  # this must not be committed, whatever the receiver does next
            connection.rollback_exc = leaked
        return leaked

    def _current(self) -> Any:
        """The connection that Django has for the own alias on this thread."""
        return connections[self.alias] if self._by_alias is None else self._by_alias.get(self.alias)

    def _lost(self, state: SessionState, failed: BaseException | None) -> str | None:
        """Why the own session is no longer usable, or None."""
        connection, handed, alias = self._connection, self._raw, self.alias
        if self._current() is not connection:
            return f"The handler put another connection in the place of {alias!r}: it may have an alias of its own."
        if connection.closed_in_transaction or (handed is not None and connection.connection is not handed):
            return (
                f"The connection {alias!r} was closed while the handler ran, and what it had not committed is lost: "
                "only the worker may call close(), close_all() and close_old_connections()."
            )
        if connection.connection is None:
            return None if is_closed(connection) else f"The handler left an atomic block open on {alias!r}."
        if state is _GONE:
            return (
                f"The session on {alias!r} was lost while the handler ran, which swallowed the error: do not catch it."
            )
        if state is _BUSY:
            return (
                f"The handler left a statement, a COPY, a pipeline or a transaction() of the driver's on {alias!r} "
                "unfinished: leave its `with` block."
            )
        if self._in_atomic:
            return self._lost_transaction(state, failed)
        # A connection that the handler opened is as Django opens it.
        autocommit = self._autocommit if handed is not None else connection.settings_dict["AUTOCOMMIT"]
        expected = self._state if handed is not None else _IDLE if autocommit else _MANUAL
        if not is_closed(connection) or (state is not expected and state in (_IN_TRANSACTION, _FAILED)):
            return (
                f"The handler left a transaction open on {alias!r}, and what it wrote there is rolled back: leave "
                "every atomic block, and commit what raw SQL began."
            )
        if connection.autocommit != autocommit or state is not expected:
            return f"The handler left autocommit changed on {alias!r}: use atomic(), or set it back."
        if handed is None and failed is not None:
            return f"The session on {alias!r} was opened by a handler that failed, perhaps while it was being set up."
        return None

    def _lost_transaction(self, state: SessionState, failed: BaseException | None) -> str | None:
        """Why a session handed out in a transaction cannot be brought back by a rollback in place, or None."""
        connection, alias = self._connection, self.alias
        if (
            not connection.in_atomic_block
            or connection.atomic_blocks != self._blocks
            or connection.savepoint_ids != self._savepoints
        ):
            return (
                f"The handler did not leave an atomic block on {alias!r}, or left the worker's: use `with atomic():`."
            )
        if connection.autocommit != self._autocommit:
            return f"The handler changed autocommit on {alias!r} inside of the worker's transaction."
        if state is _IDLE or (state is _MANUAL and failed is None):
            return (
                f"The handler ended the worker's transaction on {alias!r}, which holds its message, by SQL of its own: "
                "leave COMMIT and ROLLBACK to the worker, use atomic() or savepoints."
            )
        return None

    def _doomed(self, state: SessionState, transaction_intact: Callable[[int], bool] | None, seq: int) -> str | None:
        """Why what the handler did in the transaction handed out would not be committed as it believes, or None."""
        connection, alias = self._connection, self.alias
        if connection.needs_rollback:
            return (
                f"The handler swallowed an error, or called set_rollback(True), so the transaction on {alias!r} can "
                "only be rolled back: do not catch the error, or put an atomic() of its own around the statement that "
                "may fail."
            )
        if state is _FAILED:
            return (
                f"The handler swallowed the error of a statement, so the server would answer COMMIT on {alias!r} with "
                "ROLLBACK: do not catch the error, or put an atomic() of its own around the statement that may fail."
            )
        if transaction_intact is not None and self._backend.sessions.may_be_another_transaction(connection, self._mark):
            with suppress(Error):
                if transaction_intact(seq):
                    return None
            return (
                f"The handler rolled back the worker's transaction on {alias!r}, which held its message, and began "
                "another: leave ROLLBACK to the worker, use atomic() or savepoints."
            )
        return None


# -- other aliases ---------------------------------------------------------------------------------------------------


class OtherAliases:
    """The other connections of one thread, made on that thread.

    They belong to the handlers alone, so each has to be as Django opens it after a handler, with nothing open; or it is
    closed, and the next handler's first statement opens another session.
    """

    def __init__(self, worker_connection: Any) -> None:
        self._worker_connection = worker_connection
        self._by_alias = connections_by_alias()
        self._backends: dict[str, Backend | None] = {}
        self._last = monotonic()
        #: Alias -> the session that was open there when the handler began.
        self._sessions: dict[str, Any] = {}
        #: Alias -> its detector then; a handler may remove it.
        self._detectors: dict[str, SessionChangeDetector] = {}

    def _connections(self) -> list[tuple[Any, Backend | None]]:
        """Connections that have a session, or something open according to Django."""
        by_alias = self._by_alias
        found = []
        for connection in connections.all(initialized_only=True) if by_alias is None else by_alias.values():
            # With an event loop on this thread asgiref has entries there as well.
            if connection is self._worker_connection or not isinstance(connection, BaseDatabaseWrapper):
                continue
            if connection.connection is None and is_closed(connection):
                continue
            alias = connection.alias
            if alias not in self._backends:
                self._backends[alias] = queue_backend_of(connection)
            found.append((connection, self._backends[alias]))
        return found

    def before(self) -> None:
        """Before a handler: close connections that are dead, or have something open. No round trip, except after an
        error on a database where only that shows the state."""
        now = monotonic()
        # As at the start of a request: with CONN_HEALTH_CHECKS, Django checks a connection before its first statement.
        # Not for every message, but after a pause in which a network may drop an idle connection.
        was_idle, self._last = now - self._last > _IDLE_SECONDS, now
        self._sessions, self._detectors = {}, {}
        for connection, backend in self._connections():
            erred = connection.errors_occurred
            if not is_plain(connection, backend, ask=erred) or not _is_alive(connection, backend, erred):
                close(connection, backend)
                continue
            self._sessions[connection.alias] = connection.connection
            connection.errors_occurred = False
            if (detector := detector_of(connection)) is not None:
                detector.reset()
                self._detectors[connection.alias] = detector
            if was_idle:
                connection.health_check_done = False

    def after(self, failed: BaseException | None) -> list[str]:
        """After a handler: close connections that have something open, and return the reasons. None after a failure,
        which is the reason itself, and none for a session that died outside of a transaction: only its statement has
        failed."""
        reasons = []
        for connection, backend in self._connections():
            alias = connection.alias
            if is_plain(connection, backend, ask=connection.errors_occurred):
                same = connection.connection is self._sessions.get(alias)
                detector = self._detectors.get(alias)
                leaked = detector.restore() if detector is not None and same else None
                detector = detector or detector_of(connection)
                if (
                    (failed is not None and not same)
                    or leaked
                    or (detector is not None and detector.statement is not None)
                ):
                    # Opened by a handler that failed, perhaps by its time limit while the session was being set up; or
                    # changed for good.
                    close(connection, backend)
                continue
            if failed is None and connection.closed_in_transaction:
                reasons.append(
                    f"The handler closed the connection {alias!r} inside of an atomic block, and what it wrote there "
                    "is lost: leave the block first."
                )
            elif failed is None and not (is_closed(connection) and state_of(connection, backend) is SessionState.GONE):
                reasons.append(
                    f"The handler left a transaction open on {alias!r}, or autocommit off, and what it wrote there is "
                    "rolled back: leave every atomic block, and commit."
                )
            close(connection, backend)
        return reasons


def is_plain(connection: Any, backend: Backend | None, *, ask: bool) -> bool:
    """Whether a connection is as Django opens it, with nothing open."""
    autocommit = connection.settings_dict["AUTOCOMMIT"]
    return (
        connection.autocommit == autocommit
        and is_closed(connection)
        and state_of(connection, backend, ask=ask) is (_IDLE if autocommit else _MANUAL)
    )


def _is_alive(connection: Any, backend: Backend | None, erred: bool) -> bool:
    if backend is not None:
        return not backend.sessions.is_disconnected(connection)
    return not erred or bool(connection.is_usable())


# -- changes of a session ----------------------------------------------------------------------------------------------


class SessionChangeDetector:
    """Detects changes of a session that outlive the handler's transaction: settings, temporary tables, locks of the
    session.

    Neither Django nor the driver reports them. But each statement that goes through a cursor of Django passes its
    ``execute_wrappers``, so its text is inspected there: no round trip, and no cost for a handler that runs no
    statement. It also restores what handlers leave on Django's own connection object: wrappers, its sharing with other
    threads, its query log. Its state is that since ``reset``.
    """

    __slots__ = ("_backend", "_connection", "_logs", "_shared", "ran", "statement", "wrappers")

    def __init__(self, backend: Backend, connection: Any) -> None:
        self._backend, self._connection = backend, connection
        #: Whether a statement was executed.
        self.ran = False
        #: The first statement that has changed the session.
        self.statement: str | None = None
        #: The wrappers before the handler: one that a handler leaves there would fail the next message, and prevent
        #: even the recording of a failed attempt.
        self.wrappers: list[Any] = []

    def __call__(self, execute: Any, sql: Any, params: Any, many: bool, context: Any) -> Any:
        self.ran = True
        if self.statement is None:
            text = sql if isinstance(sql, str) else _text_of(sql, context)
            if self._is_change(text) and (not params or many or self._backend.sessions.changes_session(text, params)):
                self.statement = text[:100]
        return execute(sql, params, many, context)

    def _is_change(self, text: str) -> bool:
        if len(text) <= _INSPECTED:
            return _changes_session(self._backend, text)
        if self._backend.sessions.may_be_multiple(text):
            return self._backend.sessions.changes_session(text)  # too long for the cache
        return _changes_session(self._backend, text[:_INSPECTED])

    def reset(self) -> None:
        """Take the present state as the one before a handler."""
        self.ran = False
        self.statement = None
        connection = self._connection
        if self not in connection.execute_wrappers:
            connection.execute_wrappers.insert(0, self)  # they were cleared
        self.wrappers = connection.execute_wrappers[:]
        self._shared, self._logs = connection._thread_sharing_count, connection.force_debug_cursor

    def restore(self) -> str | None:
        """Restore Django's connection object; returns a description of a wrapper that was left there. Not to be called
        where a session was opened since: a receiver of ``connection_created`` may have put it there."""
        connection = self._connection
        # Threads of a handler that continue would write into the transaction of the next message.
        connection._thread_sharing_count = self._shared
        connection.force_debug_cursor = self._logs
        if connection.execute_wrappers == self.wrappers:
            return None
        connection.execute_wrappers[:] = self.wrappers
        return "an execute_wrapper that was not removed"


# The statements of the ORM repeat: 0.5 µs instead of up to 20.
@lru_cache(maxsize=500)
def _changes_session(backend: Backend, sql: str) -> bool:
    return backend.sessions.changes_session(sql)


def _text_of(sql: Any, context: Any) -> str:
    """The text of a statement; drivers have statement objects of their own."""
    as_string = getattr(sql, "as_string", None)
    return str(sql) if as_string is None else str(as_string(context["connection"].connection))


def watch_thread() -> None:
    """Watch the connections of the calling thread from now on, whichever code opens them."""
    _thread.watched = True
    # Receivers are called in the order of their registration: what others set up when a session is opened is not a
    # change by a handler.
    connection_created.connect(_opened, dispatch_uid="queueapp.workers.connection_guard")


def unwatch_thread() -> None:
    """Stop watching, for a thread that goes on with something else."""
    _thread.watched = False
    for connection in connections.all(initialized_only=True):
        wrappers = connection.execute_wrappers
        wrappers[:] = [wrapper for wrapper in wrappers if not isinstance(wrapper, SessionChangeDetector)]


def detector_of(connection: Any) -> SessionChangeDetector | None:
    """The detector of a connection; None where this kind of session is not supported."""
    for wrapper in connection.execute_wrappers:
        if isinstance(wrapper, SessionChangeDetector):
            return wrapper
    backend = queue_backend_of(connection) if isinstance(connection, BaseDatabaseWrapper) else None
    if backend is None:
        return None
    detector = SessionChangeDetector(backend, connection)
    detector.reset()
    return detector


def _opened(*, connection: Any, **_: Any) -> None:
    if getattr(_thread, "watched", False):
        detector = detector_of(connection)
        if detector is not None:
            detector.reset()


# -- Django's bookkeeping
# ------------------------------------------------------------------------------------------------


def connections_by_alias() -> dict[str, Any] | None:
    """The connections of this thread by alias: the dict in which Django keeps them, because a lookup through Django
    costs 1 µs. None where Django keeps them otherwise."""
    storage = getattr(connections._connections, "_storage", None)  # type: ignore[attr-defined]
    return storage.__dict__ if isinstance(storage, threading.local) else None


def is_closed(connection: Any) -> bool:
    """Whether nothing is open according to Django's bookkeeping."""
    return not (
        connection.in_atomic_block
        or connection.needs_rollback
        or connection.closed_in_transaction
        or connection.savepoint_ids
        or connection.run_on_commit
    )


def queue_backend_of(connection: Any) -> Backend | None:
    """The backend of a connection; None: a kind of database that holds no queues."""
    try:
        return backend_of(connection)
    except UnsupportedServer:
        return None


def state_of(connection: Any, backend: Backend | None, *, ask: bool = False) -> SessionState:
    """What is open on the session; on a database without queues, according to Django."""
    if backend is not None:
        return backend.sessions.state(connection, ask=ask)
    if connection.connection is None:
        return SessionState.GONE
    return SessionState.IDLE if connection.autocommit else SessionState.MANUAL


def discard(raw: Any, backend: Backend | None) -> None:
    """Close a driver's connection, whatever it is doing; the server rolls back. Never raises."""
    if backend is not None:
        backend.sessions.discard(raw)
    else:
        with suppress(Exception):
            raw.close()


def close(connection: Any, backend: Backend | None) -> None:
    """Discard the session, if there is one, and reset Django's bookkeeping to that of a connection not yet opened: the
    next statement opens another. Django itself offers neither: it assumes that code which enters an atomic block leaves
    it."""
    raw, connection.connection = connection.connection, None
    if raw is not None:
        discard(raw, backend)
    connection.in_atomic_block = False
    connection.savepoint_ids = []
    connection.atomic_blocks = []
    connection.commit_on_exit = True
    connection.needs_rollback = False
    connection.rollback_exc = None
    connection.closed_in_transaction = False
    connection.errors_occurred = False
    connection.run_on_commit = []
    connection.run_commit_hooks_on_set_autocommit_on = False
