"""Chords: the body is sent when the last member has ended, in the transaction that records this end.

One transaction stores a member's result, counts the member and, if it is the last one, sends the body (this transport
sends on the same connection) and finishes the chord::

    result stored -> part stored and counted -> (last: parts read -> chord finished -> body sent) -> commit

If the process dies before the commit, nothing is recorded, and the next delivery of the member repeats all of it. If it
dies after the commit, everything is recorded, and a redelivered member is not counted again: its part exists, or the
chord is finished. Members of one chord end one after the other, because they count in one row. With another broker the
body is sent before the commit: it may then be sent twice, and is never lost.

A failed member is counted as well. The last member then fails the chord in the same transaction: the body's result, its
error callbacks and the rest of its chain. Error callbacks that Celery calls in the worker, instead of sending them as
tasks, are called after the commit, because they are user code that may change the connection.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

from celery import maybe_signature, states
from celery.exceptions import ChordError, NotRegistered
from celery.result import GroupResult, allow_join_result
from celery.utils.functional import _regen, arity_greater
from django.db import Error, connections, transaction

from ...options import is_storable
from ...sql import backend_of
from ...sql.results import ChordPart
from . import retrying

log = logging.getLogger("queueapp")


class _TaskEnd(threading.local):
    """The transaction in which this thread ends a task: the calls to make after its commit."""

    after_commit: list[Callable[[], Any]] | None = None


class Chords:
    """The part of ``ResultBackend`` that ends tasks and counts the members of chords."""

    app: Any

    @property
    def alias(self) -> str:
        """The database of the results."""
        raise NotImplementedError

    chord_expires: Any
    _task_end = _TaskEnd()

    # -- one transaction -----------------------------------------------------------------------------------------------

    def mark_as_done(
        self, task_id: str, result: Any, request: Any = None, store_result: bool = True, state: str = states.SUCCESS
    ) -> None:
        """Store a result and count it for its chord."""
        end = partial(super().mark_as_done, task_id, result, request, store_result, state)  # type: ignore[misc]
        self._end(request, end, bool(request and request.chord))

    def mark_as_failure(self, task_id: str, exc: Any, *given: Any, request: Any = None, **options: Any) -> None:
        """Store a failure, count it for its chord, and fail the rest of its chain."""
        if isinstance(exc, NotRegistered) and not is_id(task_id):
            # The error would end Celery's worker, and any sender could cause it.
            log.error("Unknown task with the id %.300r, which is not an id: no result is stored.", task_id)
            return
        if len(given) > 1:
            given, request = given[:1] + given[2:], given[1]
        names = ("traceback", "store_result", "call_errbacks", "state")
        options |= dict(zip(names, given, strict=False))
        end = partial(super().mark_as_failure, task_id, exc, request=request, **options)  # type: ignore[misc]
        rest = request and (request.chord or request.errbacks or getattr(request, "chain", None))
        self._end(request, end, bool(rest))

    def mark_as_revoked(self, task_id: str, reason: str = "", request: Any = None, *given: Any, **options: Any) -> None:
        """Store that a task was revoked, and count it for its chord."""
        end = partial(super().mark_as_revoked, task_id, reason, request, *given, **options)  # type: ignore[misc]
        self._end(request, end, bool(request and request.chord))

    def end_discarded(self, request: Any, error: Exception, state: str, *, store_result: bool) -> None:
        """End a task whose message was discarded, in the caller's transaction, unless it has ended before. Error
        callbacks that Celery calls are called after the commit."""
        from .result_rows import results_of

        if any(row.status in states.READY_STATES for row in results_of(self.alias, [request.id])):
            return
        fail = super().mark_as_failure  # type: ignore[misc]
        end = partial(fail, request.id, error, request=request, store_result=store_result, state=state)
        if self._task_end.after_commit is not None:
            end()
            return
        calls: list[Callable[[], Any]] = []
        self._task_end.after_commit = calls
        try:
            end()
        finally:
            self._task_end.after_commit = None
        if calls:
            transaction.on_commit(partial(_call_errbacks, calls), using=self.alias)

    def _end(self, request: Any, end: Callable[[], None], is_compound: bool) -> None:
        """End a task; ``is_compound``: with more than one statement, so in a transaction."""
        if self._task_end.after_commit is not None:
            end()  # this task ends because another one does
            return
        alias = self.alias
        # The request of an unknown task lacks most attributes.
        if request is not None and not any(getattr(request, flag, False) for flag in ("is_eager", "called_directly")):
            retrying.rollback_leftovers(alias)  # in a worker, whose task has returned
        if not is_compound or connections[alias].in_atomic_block:
            end()
            return
        self._in_transaction(end)

    def _in_transaction(self, end: Callable[[], Any]) -> Any:
        after_commit: list[Callable[[], Any]] = []

        def whole() -> Any:
            after_commit.clear()
            self._task_end.after_commit = after_commit
            try:
                return end()
            finally:
                self._task_end.after_commit = None

        value = retrying.in_transaction(self.alias, whole)
        _call_errbacks(after_commit)
        return value

    def _call_task_errbacks(self, request: Any, exc: Any, traceback: Any) -> None:
        """Send error callbacks that are tasks in this transaction; call the others after its commit."""
        call = super()._call_task_errbacks  # type: ignore[misc]
        if self._task_end.after_commit is None:
            call(request, exc, traceback)
            return
        errbacks = [maybe_signature(errback, app=self.app) for errback in request.errbacks or ()]
        called = [errback for errback in errbacks if self._is_called(errback)]
        sent = [errback for errback in errbacks if errback not in called]
        if sent:
            call(_with_errbacks(request, sent), exc, traceback)
        if called:
            self._task_end.after_commit.append(partial(call, _with_errbacks(request, called), exc, traceback))

    def _is_called(self, errback: Any) -> bool:
        """Whether Celery calls it in the failing worker, by the rule of ``Backend._call_task_errbacks``."""
        if not errback._app:
            errback._app = self.app
        try:
            header = getattr(errback.type, "__header__", None)
        except NotRegistered:
            return False
        if header is None or isinstance(header, partial):
            return False
        newer = getattr(self, "_errback_arity_greater", None)  # since 5.7
        return bool(newer(errback, 1) if newer is not None else arity_greater(header, 1))

    # -- counting ------------------------------------------------------------------------------------------------------

    def apply_chord(self, header_result_args: Any, body: Any, **_: Any) -> None:
        """Store the shape of a header that contains groups: its members are counted as a flat list."""
        if isinstance(header_result_args[1], _regen):
            return
        header = self.app.GroupResult(*header_result_args)
        if any(isinstance(result, GroupResult) for result in header.results):
            self._keep_group(header.id, header, self.chord_expires)  # type: ignore[attr-defined]

    def set_chord_size(self, group_id: str, chord_size: int) -> None:
        """Store the number of members of a chord."""
        self._change_group("set_size", group_id, chord_size)

    def add_to_chord(self, chord_id: str, result: Any) -> None:
        """Add one member to a chord."""
        self._change_group("add_to_size", chord_id)

    def _change_group(self, verb: str, group_id: str, *given: Any) -> None:
        from .models import CeleryGroup

        alias, table = self.alias, CeleryGroup._meta.db_table

        def change() -> None:
            connection = connections[alias]
            getattr(backend_of(connection).celery_results, verb)(
                connection, table, group_id, *given, in_ms(self.chord_expires)
            )

        retrying.with_retries(alias, change)

    def on_chord_part_return(self, request: Any, state: str, result: Any, **_: Any) -> None:
        """Count a member that has ended; the last one sends the body, or fails the chord."""
        if not request.id or not request.group:
            return
        count = partial(self._count, request, state, result)
        if self._task_end.after_commit is not None or connections[self.alias].in_atomic_block:
            count()
        else:
            self._in_transaction(count)

    def _count(self, request: Any, state: str, result: Any) -> None:
        from . import result_rows
        from .models import CeleryChordPart, CeleryGroup

        connection = connections[self.alias]
        value = self.encode(self.encode_result(result, state))  # type: ignore[attr-defined]
        part = ChordPart(request.group, request.id, result_rows.position_of(request.group_index), state, value)
        counted = backend_of(connection).celery_results.count_part(
            connection, CeleryGroup._meta.db_table, CeleryChordPart._meta.db_table, part, in_ms(self.chord_expires)
        )
        if counted.size == result_rows.EXPIRED:
            self._fail_expired(request)
        elif counted.size is None:
            # The sender has not stored the size yet. If it never does, maintenance reports the part.
            result_rows.expire_group(self.alias, request.group, in_ms(self.expires))  # type: ignore[attr-defined]
        elif counted.is_over:
            result_rows.delete_parts(self.alias, request.group)  # this member is late, or redelivered
            result_rows.expire_group(self.alias, request.group, in_ms(self.expires))  # type: ignore[attr-defined]
        elif counted.is_complete:
            parts = result_rows.parts_of(self.alias, request.group)
            result_rows.end_chord(self.alias, request.group, in_ms(self.expires))  # type: ignore[attr-defined]
            self._complete(request, parts)

    def _fail_expired(self, request: Any) -> None:
        """Fail the body of a chord that expired (``result_chord_expires``) before this member ended. Once: for the
        first such one."""
        from . import result_rows

        result_rows.delete_parts(self.alias, request.group)
        result_rows.close_expired(self.alias, request.group)
        try:
            raise ChordError(f"The chord expired before its member {request.id} ended (result_chord_expires)")
        except ChordError as error:  # Celery reads the traceback of the current exception
            body = maybe_signature(request.chord, app=self.app)
            self.chord_error_from_stack(body, error)  # type: ignore[attr-defined]

    def _complete(self, request: Any, parts: list[Any]) -> None:
        """Send the body of a chord whose members have all ended; fail the chord if that is not possible."""
        body = maybe_signature(request.chord, app=self.app)
        try:
            values = self._values(request.group, parts)
        except Exception as error:
            self._raise_database_error(error)
            log.error("Chord %s failed: %r", request.group, error, extra={"group_id": request.group})
            cause = error if isinstance(error, ChordError) else ChordError(f"Join error: {error!r}")
            self.chord_error_from_stack(body, cause)  # type: ignore[attr-defined]
            return
        try:
            with transaction.atomic(using=self.alias):
                body.delay(values)
        except Exception as error:
            self._raise_database_error(error)
            log.exception("The body of chord %s could not be sent.", request.group)
            self.chord_error_from_stack(body, ChordError(f"Callback error: {error!r}"))  # type: ignore[attr-defined]

    def _values(self, group_id: str, parts: list[Any]) -> list[Any]:
        """The return values of the members. Raises ChordError for the first one that failed."""
        header = GroupResult.restore(group_id, backend=self, app=self.app)
        if header is not None:
            # The header contains groups. All members have ended, so this does not wait.
            header.on_ready()
            with allow_join_result():
                return list(header.join_native(timeout=self.app.conf.result_chord_join_timeout, propagate=True))
        return [self._value_of(part) for part in parts]

    def _value_of(self, part: Any) -> Any:
        value = self.decode(part.result)  # type: ignore[attr-defined]
        if part.status in states.EXCEPTION_STATES:
            value = self.exception_to_python(value)  # type: ignore[attr-defined]
        if part.status in states.PROPAGATE_STATES:
            error = ChordError(f"Dependency {part.task_id} raised {value!r}")
            error.__cause__ = value if isinstance(value, Exception) else None
            raise error
        return value

    def _raise_database_error(self, error: BaseException | None) -> None:
        """Raise a database error: it is not a failure of the chord. The transaction is rolled back, and retried by this
        call or by the next delivery of the task."""
        cause = error
        while cause is not None:
            if isinstance(cause, Error):
                assert error is not None
                raise error
            cause = cause.__cause__


def _call_errbacks(calls: list[Callable[[], Any]]) -> None:
    for call in calls:
        try:
            call()
        except Exception:
            log.exception("An error callback failed.")


def _with_errbacks(request: Any, errbacks: list[Any]) -> Any:
    from celery.app.task import Context

    return Context(request.__dict__, errbacks=errbacks)


def is_id(task_id: Any) -> bool:
    """Whether a result can be stored under this id."""
    from .models import MAX_ID_LENGTH

    return is_storable(task_id, MAX_ID_LENGTH)


def in_ms(expires: float | timedelta | None) -> int | None:
    """Celery's seconds in milliseconds; None and 0 mean for ever."""
    if isinstance(expires, timedelta):
        expires = expires.total_seconds()
    return int(expires * 1000) if expires else None
