"""Chords: the body is sent when the last member has ended, in the transaction that says so.

One transaction stores a member's result, counts the member, and, if it was the last one, sends the body (our transport sends
on the same connection) and closes the chord::

    result stored -> part kept and counted -> (last: parts read -> chord is over -> body sent) -> commit

A process that dies before the commit has done nothing of it, and whoever runs the member again does all of it. One that dies
after it has done everything, and a member that comes again is not counted: its part is there, or the chord is over. Members of
one chord end one after the other, because they count in one row. On another broker than ours the body is sent before the
commit: then it may be sent twice, and is never lost.

A member that fails is counted as well. The last one then fails the chord, in the same transaction: the body's result, its
callbacks for errors, and whatever was to come after it. Callbacks that Celery calls in the worker, instead of sending them as
tasks, are called after the commit: they are the user's code, and may do anything to the connection.
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

from ...sql import backend_of
from ...sql.results import ChordPart
from . import retrying

log = logging.getLogger("queueapp")


class _Ending(threading.local):
    """The transaction in which this thread ends a task, and what is called after it."""

    late: list[Callable[[], Any]] | None = None


class Chords:
    """Part of ``ResultBackend``."""

    app: Any

    @property
    def alias(self) -> str:
        """The database that results are kept in."""
        raise NotImplementedError

    chord_expires: Any
    _ending = _Ending()

    # -- one transaction -----------------------------------------------------------------------------------------------

    def mark_as_done(
        self, task_id: str, result: Any, request: Any = None, store_result: bool = True, state: str = states.SUCCESS
    ) -> None:
        """Store a result and count it for its chord."""
        end = partial(super().mark_as_done, task_id, result, request, store_result, state)  # type: ignore[misc]
        self._end(request, end, bool(request and request.chord))

    def mark_as_failure(self, task_id: str, exc: Any, *given: Any, request: Any = None, **options: Any) -> None:
        """Store a failure, count it for its chord, and fail what was to come after it."""
        if isinstance(exc, NotRegistered) and not is_id(task_id):
            # Celery's worker would end with the error: anybody's message could bring it down.
            log.error("The task %.300r is not known here, and its id is none: no result is kept.", task_id)
            return
        if len(given) > 1:
            given, request = given[:1] + given[2:], given[1]
        names = ("traceback", "store_result", "call_errbacks", "state")
        options |= dict(zip(names, given, strict=False))
        end = partial(super().mark_as_failure, task_id, exc, request=request, **options)  # type: ignore[misc]
        more = request and (request.chord or request.errbacks or getattr(request, "chain", None))
        self._end(request, end, bool(more))

    def mark_as_revoked(self, task_id: str, reason: str = "", request: Any = None, *given: Any, **options: Any) -> None:
        """Store that a task was revoked, and count it for its chord."""
        end = partial(super().mark_as_revoked, task_id, reason, request, *given, **options)  # type: ignore[misc]
        self._end(request, end, bool(request and request.chord))

    def _end(self, request: Any, end: Callable[[], None], several: bool) -> None:
        """End a task; ``several``: with more than one statement, so in a transaction."""
        if self._ending.late is not None:
            end()  # a task that ends because of another one
            return
        alias = self.alias
        # Of a task that the worker does not know the request says next to nothing.
        if request is not None and not any(getattr(request, one, False) for one in ("is_eager", "called_directly")):
            retrying.rollback_leftovers(alias)  # a worker's: the task is over
        if not several or connections[alias].in_atomic_block:
            end()
            return
        self._in_transaction(end)

    def _in_transaction(self, end: Callable[[], Any]) -> Any:
        late: list[Callable[[], Any]] = []

        def whole() -> Any:
            late.clear()
            self._ending.late = late
            try:
                return end()
            finally:
                self._ending.late = None

        value = retrying.in_transaction(self.alias, whole)
        for call in late:
            try:
                call()
            except Exception:
                log.exception("A callback for errors failed.")
        return value

    def _call_task_errbacks(self, request: Any, exc: Any, traceback: Any) -> None:
        """Within the transaction those that are tasks are sent; the others are called after it."""
        call = super()._call_task_errbacks  # type: ignore[misc]
        if self._ending.late is None:
            call(request, exc, traceback)
            return
        everything = [maybe_signature(one, app=self.app) for one in request.errbacks or ()]
        called = [one for one in everything if self._is_called(one)]
        sent = [one for one in everything if one not in called]
        if sent:
            call(_with_errbacks(request, sent), exc, traceback)
        if called:
            self._ending.late.append(partial(call, _with_errbacks(request, called), exc, traceback))

    def _is_called(self, errback: Any) -> bool:
        """Whether Celery calls it where the task has failed, as ``Backend._call_task_errbacks`` decides it."""
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
        """Keep the shape of a header in which there are groups: its members come as a flat list."""
        if isinstance(header_result_args[1], _regen):
            return
        header = self.app.GroupResult(*header_result_args)
        if any(isinstance(one, GroupResult) for one in header.results):
            self._keep_group(header.id, header, self.chord_expires)  # type: ignore[attr-defined]

    def set_chord_size(self, group_id: str, chord_size: int) -> None:
        """Say how many members a chord has."""
        self._change_group("set_size", group_id, chord_size)

    def add_to_chord(self, chord_id: str, result: Any) -> None:
        """Say that a chord has one member more."""
        self._change_group("add_to_size", chord_id)

    def _change_group(self, verb: str, group_id: str, *given: Any) -> None:
        from .models import CeleryGroup

        alias, table = self.alias, CeleryGroup._meta.db_table

        def change() -> None:
            connection = connections[alias]
            getattr(backend_of(connection), verb)(connection, table, group_id, *given, in_ms(self.chord_expires))

        retrying.with_retries(alias, change)

    def on_chord_part_return(self, request: Any, state: str, result: Any, **_: Any) -> None:
        """Count a member that has ended; the last one sends the body, or fails the chord."""
        if not request.id or not request.group:
            return
        count = partial(self._count, request, state, result)
        if self._ending.late is not None or connections[self.alias].in_atomic_block:
            count()
        else:
            self._in_transaction(count)

    def _count(self, request: Any, state: str, result: Any) -> None:
        from . import result_rows
        from .models import CeleryChordPart, CeleryGroup

        connection = connections[self.alias]
        value = self.encode(self.encode_result(result, state))  # type: ignore[attr-defined]
        part = ChordPart(request.group, request.id, result_rows.place_of(request.group_index), state, value)
        counted = backend_of(connection).celery_results.count_part(
            connection, CeleryGroup._meta.db_table, CeleryChordPart._meta.db_table, part, in_ms(self.chord_expires)
        )
        if counted.is_over:
            result_rows.drop_parts(self.alias, request.group)  # this one came late, or once more
        elif counted.is_complete:
            parts = result_rows.parts_of(self.alias, request.group)
            result_rows.end_chord(self.alias, request.group)
            self._complete(request, parts)

    def _complete(self, request: Any, parts: list[Any]) -> None:
        """Send the body of a chord whose members have all ended; where that cannot be, fail it."""
        body = maybe_signature(request.chord, app=self.app)
        try:
            values = self._values(request.group, parts)
        except Exception as error:
            self._raise_errors_of_the_database(error)
            log.error("Chord %s: %r", request.group, error)
            cause = error if isinstance(error, ChordError) else ChordError(f"Join error: {error!r}")
            self.chord_error_from_stack(body, cause)  # type: ignore[attr-defined]
            return
        try:
            with transaction.atomic(using=self.alias):
                body.delay(values)
        except Exception as error:
            self._raise_errors_of_the_database(error)
            log.exception("The body of chord %s could not be sent.", request.group)
            self.chord_error_from_stack(body, ChordError(f"Callback error: {error!r}"))  # type: ignore[attr-defined]

    def _values(self, group_id: str, parts: list[Any]) -> list[Any]:
        """What the members have returned. Raises ChordError for the first that has failed."""
        header = GroupResult.restore(group_id, backend=self, app=self.app)
        if header is not None:
            # There are groups in it. All of them have ended, so nobody waits here.
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

    def _raise_errors_of_the_database(self, error: BaseException | None) -> None:
        """They are no failure of the chord: the transaction is rolled back, and tried again or left to who runs the task
        again."""
        found = error
        while found is not None:
            if isinstance(found, Error):
                assert error is not None
                raise error
            found = found.__cause__


def _with_errbacks(request: Any, errbacks: list[Any]) -> Any:
    from celery.app.task import Context

    return Context(request.__dict__, errbacks=errbacks)


def is_id(task_id: Any) -> bool:
    """Whether a result can be kept by it."""
    from .models import MAX_ID_LENGTH

    return isinstance(task_id, str) and len(task_id) <= MAX_ID_LENGTH and "\0" not in task_id


def in_ms(expires: float | timedelta | None) -> int | None:
    """Seconds, as Celery has them, in milliseconds; None and 0 are for ever."""
    if isinstance(expires, timedelta):
        expires = expires.total_seconds()
    return int(expires * 1000) if expires else None
