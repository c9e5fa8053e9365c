"""After every handler: are the connections of its thread as they were handed out?

A handler is somebody else's code on the worker's own connection. What it leaves behind there would roll back the next ack
in silence, or make every claim of the thread fail; what it leaves on another alias would fail the messages that follow.
So a task asks ``HandedOut`` before and after each handler. When all is well a pair costs no round trip and, within a batch,
0.2 µs, in a transaction 1.2 µs, and 3.5 µs on a thread whose handlers have opened another alias (PostgreSQL, CPU time).

A handler that has changed its session for good (``SET search_path``, ``SET ROLE``, a time-out; ``changes`` says how that is
known) has not failed, but the next one gets another session. So does the one after a statement that was refused, which may
be what an unseen change has done to it.

Not noticed, because neither Django nor the driver is told:

* of such changes those made past Django's cursors, or in a function, where the server does not report them by itself; cursors
  WITH HOLD of the driver;
* a transaction that raw SQL ended and began anew: on PostgreSQL by COMMIT, or with prepared statements turned off; on SQL
  Server without an error that Django flags. The others are suspected: see ``stands`` of ``after``;
* on SQL Server, BEGIN TRANSACTION in autocommit by a handler that met no error; on databases that are no home of queues,
  what Django's own bookkeeping does not say;
* connections that Django does not keep for this thread: of threads that a handler starts, or made with ``copy()``.

A savepoint that ``transaction.savepoint()`` or raw SQL left open is none of anybody's business: the commit ends it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from django.db import DataError, Error, IntegrityError, connections

from queueapp.sql import Backend, ErrorKind, SessionState, backend_of

from .bookkeeping import abandon, close, home_of, is_clean, opened_by_this_thread
from .changes import Changes, changes_of, watch_thread
from .other_aliases import OtherAliases, is_plain

_GONE, _BUSY, _FAILED = SessionState.GONE, SessionState.BUSY, SessionState.FAILED
_IDLE, _MANUAL, _IN_TRANSACTION = SessionState.IDLE, SessionState.MANUAL, SessionState.IN_TRANSACTION


class LeftBehind(Exception):
    """An attempt has failed although its handler returned: what it did cannot be committed, or would harm what follows.

    The text says what the handler did and what to do instead. An error that it had swallowed is the ``__cause__``.
    """

    def __init__(self, reasons: list[str], *, replaced: bool) -> None:
        super().__init__(" ".join(reasons))
        self.reasons = reasons
        #: The task's own session is gone, and with it what it held; the next statement opens another. False: it is there, and
        #: a transaction that it was handed out in can be rolled back in place.
        self.replaced = replaced


class HandedOut:
    """The connections of one thread, made on that thread; ``alias`` is the task's own.

    Around each handler: ``before()``, the handler, ``after(failed)``; while ``fresh``, the handler and ``is_untouched()`` are
    enough, and ``after`` where that says no. ``after`` is called where ``before`` was: inside of
    the ``atomic`` that the task has opened and before its commit; both only when no exception can strike from outside. What
    is not fit for use it closes at once, on every alias, and the server rolls that back.

    A task inside of its own ``atomic`` leaves it by an exception of its own (``RollBack``) when ``after`` has returned
    something. If that is ``replaced``, Django's bookkeeping is that of a connection which was closed in a transaction: until
    the end of the block every statement is refused, and the end does no I/O, raises nothing and commits nothing. If it is
    not, the transaction is marked for a rollback, and ``lock_again`` may be that rollback.

    A strike from outside (a time limit) may hit a driver between a server's answer and its own notes, which nobody can see.
    Outside of ``atomic`` a task does well to ``replace()`` after each.
    """

    __slots__ = (
        "_autocommit", "_backend", "_blocks", "_changes", "_connection", "_in_atomic", "_mark", "_opened", "_others", "_raw",
        "_savepoints", "_session_state", "_settings", "_settings_of", "_state", "alias", "changed", "fresh", "stale",
    )  # fmt: skip

    def __init__(self, alias: str) -> None:
        self.alias = alias
        self._connection: Any = connections[alias]
        self._backend: Backend = backend_of(self._connection)
        self._opened: Any = opened_by_this_thread()
        watch_thread()
        self._others = OtherAliases(self._connection)
        changes = changes_of(self._connection)
        assert changes is not None
        self._changes: Changes = changes
        #: How the last handler has changed the session for good: its statement, or ``""`` when that was not seen.
        self.changed: str | None = None
        #: The session is not to be handed out any more: outside of every ``atomic`` of the task, ``mend`` replaces it.
        self.stale = False
        #: What is known of the settings of this session.
        self._settings: tuple[Any, ...] = ()
        self._settings_of: Any = None
        # What was handed out:
        self._raw: Any = None
        #: The last ``after`` saw the session unchanged in autocommit, and the thread has no other: it may be handed out again
        #: without ``before``, unless somebody has used it since (``used``).
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
        """Remember what is handed out. A session on another alias that is dead, or was left in the middle of something, is
        closed, so that the handler's first statement there opens another."""
        self.fresh = False
        if self._opened is None or len(self._opened) > 1:
            self._others.heal()
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
            # Nobody can work with that: better met here than by the handler. One not yet opened is set right as well.
            self.replace()
            state = _GONE
        self._raw = raw = connection.connection
        self._changes.forget()
        if raw is not self._settings_of:
            self._settings, self._settings_of = self._backend.sessions.settings(connection), raw
        self._autocommit = connection.autocommit
        # Django keeps what broke an earlier transaction, and would give it as the cause where this handler is refused a statement.
        connection.rollback_exc = None
        self._state = state

    def after(
        self, failed: BaseException | None = None, stands: Callable[[int], bool] | None = None, seq: int = 0
    ) -> LeftBehind | None:
        """Why the attempt has failed although the handler returned; None when all is as it was handed out.

        ``failed`` is what the handler raised. It stays the reason then: nothing is said of what the rollback that follows
        mends anyway, nor of other aliases, so what is returned is always ``replaced``, with ``failed`` as its ``__cause__``.
        ``stands(seq)`` says whether the open transaction still holds what was claimed in it. It is asked, at the price of its
        statement, only when that transaction may be another than the one handed out; a database error from it counts as no.
        """
        opened = self._opened
        others = self._others.take_back(failed) if opened is None or len(opened) > 1 else []
        self.changed = None
        changes = self._changes
        if changes.ran or self._connection.execute_wrappers != changes.wrappers:
            self._look_for_changes(failed)
        if failed is None and not others and not self.stale and self._is_as_handed_out():
            if not self._in_atomic and opened is not None and len(opened) == 1 and self._raw is not None:
                self.fresh = True
            else:
                self._raw = None
            return None
        self.fresh = False
        left = self._judge(failed, others, stands, seq)
        if self.stale and not self._in_atomic:
            self.replace()
        return left

    def is_untouched(self) -> bool:
        """While ``fresh``, after a handler that returned: whether nothing at all has changed, so that there is nothing to judge
        and the next message may have all of it as it is. The question of every message of a batch: reading attributes."""
        connection, opened = self._connection, self._opened
        return not (
            self._changes.ran
            or connection.execute_wrappers != self._changes.wrappers
            or connection.connection is not self._raw
            or connection.in_atomic_block
            or connection.needs_rollback
            or connection.errors_occurred
            or connection.closed_in_transaction
            or connection.savepoint_ids
            or connection.run_on_commit
            or connection.autocommit is not self._autocommit
            or len(opened) != 1
            or opened.get(self.alias) is not connection
            or self._session_state(connection) is not self._state
        )

    def used(self) -> None:
        """The task itself has used its connection since the last ``after``, or may have: look anew before the next handler."""
        self.fresh = False

    def mend(self) -> None:
        """After code of the user's that is no handler: hooks after a commit, policies, receivers of signals. Whatever they left
        on the own alias, the next statement is in autocommit. For a task that is outside of every ``atomic`` of its own."""
        self.fresh = False
        connection, changes = self._connection, self._changes
        same = connection.connection is not None and connection.connection is self._settings_of
        if (
            self.stale
            or (same and connection.execute_wrappers != changes.wrappers and changes.take_back())
            or changes.statement
            or self._registered() is not connection
            or not (
                is_plain(connection, self._backend, ask=False)
                or (connection.connection is None and is_clean(connection))
            )
        ):
            self.replace()

    def replace(self) -> None:
        """Make the own alias usable whatever its state: the session is closed unseen, and rolled back by the server; Django's
        bookkeeping is that of a connection not yet opened. For a task that is outside of every ``atomic`` of its own."""
        connection, handed = self._connection, self._raw
        self._raw = None
        self.stale = self.fresh = False
        self._changes.forget()
        intruder = self._registered()
        if intruder is not connection:
            connections[self.alias] = connection
            if intruder is not None:
                close(intruder, home_of(intruder))
        if (
            handed is not None
            and handed is not connection.connection
            # A pool has it back, and may have given it to another thread.
            and not connection.settings_dict["OPTIONS"].get("pool")
        ):
            # Taken away from Django, which may not have closed it: it would keep what it has locked.
            abandon(handed, self._backend)
        close(connection, self._backend)

    def _look_for_changes(self, failed: BaseException | None) -> None:
        """After a handler that has run statements: may the next one have its session?"""
        connection, changes = self._connection, self._changes
        opened = self._raw is None or connection.connection is not self._raw
        left = None if opened else changes.take_back()
        if changes.statement is not None:
            self.changed = changes.statement
        elif left is not None:
            self.changed = left
        elif connection.connection is self._settings_of and self._settings != self._backend.sessions.settings(
            connection
        ):
            self.changed = ""
        self.stale = self.changed is not None or (failed is not None and self._was_refused(failed))
        changes.forget()

    def _was_refused(self, failed: BaseException) -> bool:
        """Whether the session may be why: no right, no such table, read-only, out of time."""
        return (
            isinstance(failed, Error)
            and not isinstance(failed, IntegrityError | DataError)
            and self._backend.error_kind(failed) not in (ErrorKind.DEADLOCK, ErrorKind.LOCKED)
        )

    # -- the own alias ----------------------------------------------------------------------------------------------

    def _is_as_handed_out(self) -> bool:
        """Whether nothing at all has changed: the question of every message, so all that it costs is reading attributes."""
        connection = self._connection
        if (
            connection.connection is not self._raw
            or connection.autocommit != self._autocommit
            or connection.in_atomic_block != self._in_atomic
            or connection.needs_rollback
            or connection.errors_occurred
            or connection.closed_in_transaction
            or self._registered() is not connection
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
        self, failed: BaseException | None, reasons: list[str], stands: Callable[[int], bool] | None, seq: int
    ) -> LeftBehind | None:
        connection = self._connection
        # Where the driver does not know, the server is asked once something has gone wrong.
        state = self._backend.sessions.state(connection, ask=failed is not None or connection.errors_occurred)
        swallowed = connection.rollback_exc
        lost = self._lost(state, failed)
        doomed = self._doomed(state, stands, seq) if lost is None and failed is None and self._in_atomic else None
        if lost is not None:
            reasons.insert(0, lost)
            self.replace()
            if self._in_atomic:
                # What Django makes of a connection that is closed in a transaction, so that the task's own blocks end without
                # a word. But for needs_rollback: that would outlive them, and refuse the statement that opens a session.
                connection.in_atomic_block = True
                connection.atomic_blocks = self._blocks
                connection.savepoint_ids = self._savepoints
                connection.closed_in_transaction = True
        else:
            self._raw = None
            connection.errors_occurred = False  # it was looked at since, and works
            if doomed is not None:
                reasons.insert(0, doomed)
        if not reasons:
            return None
        left = LeftBehind(reasons, replaced=lost is not None)
        left.__cause__ = failed or swallowed
        if self._in_atomic and lost is None:
            connection.needs_rollback = True  # whatever the task makes of it, this is not committed
            connection.rollback_exc = left
        return left

    def _registered(self) -> Any:
        """What Django gives to whoever asks for the own alias on this thread."""
        return connections[self.alias] if self._opened is None else self._opened.get(self.alias)

    def _lost(self, state: SessionState, failed: BaseException | None) -> str | None:
        """Why the own session cannot be used any more, or None."""
        connection, handed, alias = self._connection, self._raw, self.alias
        if self._registered() is not connection:
            return f"The handler put another connection in the place of {alias!r}: it may have an alias of its own."
        if connection.closed_in_transaction or (handed is not None and connection.connection is not handed):
            return (
                f"The connection {alias!r} was closed while the handler ran, and what it had not committed is lost: "
                "close(), close_all() and close_old_connections() are the worker's business, not a handler's."
            )
        if connection.connection is None:
            return None if is_clean(connection) else f"The handler left an atomic block open on {alias!r}."
        if state is _GONE:
            return f"The session on {alias!r} was lost while the handler ran, which swallowed the error: let it pass."
        if state is _BUSY:
            return (
                f"The handler left a statement, a COPY, a pipeline or a transaction() of the driver's on {alias!r} unfinished: "
                "leave its `with` block."
            )
        if self._in_atomic:
            return self._lost_transaction(state, failed)
        # A connection that the handler opened is as Django opens it.
        autocommit = self._autocommit if handed is not None else connection.settings_dict["AUTOCOMMIT"]
        expected = self._state if handed is not None else _IDLE if autocommit else _MANUAL
        if not is_clean(connection) or (state is not expected and state in (_IN_TRANSACTION, _FAILED)):
            return (
                f"The handler left a transaction open on {alias!r}, and what it wrote there is rolled back: leave every "
                "atomic block, and commit what raw SQL began."
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
                f"The handler ended the worker's transaction on {alias!r}, which holds its message, by SQL of its own: leave "
                "COMMIT and ROLLBACK to the worker, use atomic() or savepoints."
            )
        return None

    def _doomed(self, state: SessionState, stands: Callable[[int], bool] | None, seq: int) -> str | None:
        """Why what the handler did in the transaction handed out would not be committed as it believes, or None."""
        connection, alias = self._connection, self.alias
        if connection.needs_rollback:
            return (
                f"The handler swallowed an error, or called set_rollback(True), so the transaction on {alias!r} can only be "
                "rolled back: let the error pass, or put an atomic() of its own around what may fail."
            )
        if state is _FAILED:
            return (
                f"The handler swallowed the error of a statement, so the server would answer COMMIT on {alias!r} with "
                "ROLLBACK: let the error pass, or put an atomic() of its own around what may fail."
            )
        if stands is not None and self._backend.sessions.may_be_another_transaction(connection, self._mark):
            with suppress(Error):
                if stands(seq):
                    return None
            return (
                f"The handler rolled back the worker's transaction on {alias!r}, which held its message, and began another: "
                "leave ROLLBACK to the worker, use atomic() or savepoints."
            )
        return None
