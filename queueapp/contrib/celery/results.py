"""Celery's results in the application's database: ``result_backend = "queueapp://"``, or ``"queueapp://alias"``.

The last state of each task is a row, in which a success is never overwritten; times are the database's. Results are
JSON, never pickle: write access to a table must not allow code execution in its readers. Chords are in ``chords``.

A caller waits for a result without frequent polling: it polls, is notified that a task has ended, and polls again. One
thread per process and database listens, on its own connection, while a caller waits for longer than an instant. A
notification is a hint: without notifications (SQL Server, a connection pooler) polls become less and less frequent. The
calls come from Celery, so threads are the interpreter's own: greenlets where gevent has patched them.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

from celery import states
from celery.backends.base import BaseBackend
from celery.exceptions import ImproperlyConfigured, TimeoutError
from celery.result import ResultBase, result_from_tuple
from django.apps import apps
from django.db import DatabaseError, Error, connections, router

from ...conf import settings
from ...failures.history import clean
from ...sending.isolation import outside_transaction
from ...sql import backend_of
from ...sql.database import ListenerConnection
from ...sql.results import TaskState
from . import retrying
from .chords import Chords, in_ms, is_id

SCHEME = "queueapp"
#: Keys of a task's meta data that have a column of their own.
_COLUMNS = frozenset(
    (
        "task_id",
        "status",
        "result",
        "traceback",
        "children",
        "date_done",
        "name",
        "args",
        "kwargs",
        "worker",
        "retries",
        "queue",
    )
)
#: Maximum number of tasks that one statement reads.
_IDS_PER_STATEMENT = 1000
_MAX_TEXT = 1_000_000


class ResultBackend(Chords, BaseBackend):
    """Stores results in the tables of ``queueapp.contrib.celery``."""

    supports_native_join = True
    supports_failure_expires = True
    persistent = True

    def __init__(self, app: Any, serializer: str | None = None, url: str | None = None, **options: Any) -> None:
        wanted = serializer or app.conf.result_serializer
        if wanted != "json":
            raise ImproperlyConfigured(
                f"result_serializer = {wanted!r} is not accepted: results in {SCHEME}:// are JSON. Use 'json'."
            )
        options["accept"] = ["json"]  # the only format that is written here, even if tasks accept others
        super().__init__(app, serializer=wanted, url=url or f"{SCHEME}://", **options)
        self._url_alias = _alias_of(self.url)
        failure = app.conf.get("result_failure_expires")
        self.failure_expires = self.expires if failure is None else self.prepare_expires(failure)
        chord = app.conf.get("result_chord_expires")
        #: None: an unfinished chord does not expire.
        self.chord_expires = None if chord is None else self.prepare_expires(chord)

    @property
    def alias(self) -> str:
        """The database of the results."""
        if not apps.is_installed("queueapp.contrib.celery"):
            raise ImproperlyConfigured(
                "Results in queueapp:// need 'queueapp.contrib.celery' in INSTALLED_APPS, and `manage.py migrate`."
            )
        from .models import CeleryResult

        alias = self._url_alias or router.db_for_write(CeleryResult)
        if alias not in connections:
            known = ", ".join(sorted(connections))
            raise ImproperlyConfigured(f"result_backend = {self.url!r}: DATABASES has no {alias!r}; it has {known}.")
        return alias

    # -- one result ----------------------------------------------------------------------------------------------------

    def _store_result(
        self, task_id: str, result: Any, state: str, traceback: Any = None, request: Any = None, **_: Any
    ) -> Any:
        from .models import CeleryResult

        stored = self._stored(task_id, result, state, traceback, request)
        alias = self.alias
        table = CeleryResult._meta.db_table

        def store() -> bool:
            return backend_of(connections[alias]).celery_results.store_result(connections[alias], table, stored)

        retrying.with_retries(alias, store)
        return result

    def _stored(self, task_id: str, result: Any, state: str, traceback: Any, request: Any) -> TaskState:
        _check_id(task_id)
        meta = self._get_result_meta(None, state, traceback, request, format_date=False)
        extra = {key: value for key, value in meta.items() if key not in _COLUMNS}
        expires = self.failure_expires if state in states.EXCEPTION_STATES else self.expires
        return TaskState(
            task_id=task_id,
            status=clean(state, 50),
            done=state in states.READY_STATES,
            result=self.encode(result),
            traceback=clean(traceback, _MAX_TEXT) if traceback else None,
            children=self._encoded(meta.get("children") or None),
            args=self._encoded(meta.get("args")),
            kwargs=self._encoded(meta.get("kwargs")),
            meta=self._encoded(extra or None),
            name=_text(getattr(request, "task", None)),
            worker=_text(getattr(request, "hostname", None)),
            queue=_text((getattr(request, "delivery_info", None) or {}).get("routing_key")),
            retries=int(getattr(request, "retries", None) or 0),
            expires_ms=in_ms(expires),
        )

    def _encoded(self, value: Any) -> str | None:
        """As JSON; a value that JSON has no form for, which may be a task's argument, as its repr."""
        if value is None:
            return None
        try:
            return str(self.encode(value))
        except Exception:
            return json.dumps(clean(repr(value), _MAX_TEXT))

    def _get_task_meta_for(self, task_id: str) -> dict[str, Any]:
        found = self._metas([task_id])
        return found.get(task_id) or {"task_id": task_id, "status": states.PENDING, "result": None, "traceback": None}

    def _metas(self, ids: list[str]) -> dict[str, dict[str, Any]]:
        """The stored meta data of these tasks; tasks without a row are left out."""
        from .result_rows import results_of

        alias = self.alias
        rows = retrying.with_retries(alias, lambda: results_of(alias, ids))
        found = {row.task_id: self._meta_of(row) for row in rows}
        unfinished = [task_id for task_id in ids if found.get(task_id, {}).get("status") not in states.READY_STATES]
        connection = connections[alias]
        if unfinished and connection.in_atomic_block and backend_of(connection).sessions.has_fixed_snapshot(connection):
            # The caller's transaction never sees a task end that ends after its first statement.
            later = outside_transaction(alias, lambda: results_of(alias, unfinished))
            found |= {row.task_id: self._meta_of(row) for row in later}
        return found

    def _meta_of(self, row: Any) -> dict[str, Any]:
        meta = {
            **(json.loads(row.meta) if row.meta else {}),
            "task_id": row.task_id,
            "status": row.status,
            "result": self.decode(row.result) if row.result is not None else None,
            "traceback": row.traceback,
            "children": self.decode(row.children) if row.children else [],
            "date_done": row.date_done,
            "retries": row.retries,
        }
        meta |= {name: value for name in ("name", "worker", "queue") if (value := getattr(row, name))}
        meta |= {name: self.decode(value) for name in ("args", "kwargs") if (value := getattr(row, name)) is not None}
        return dict(self.meta_from_decoded(meta))

    def task_result_exists(self, task_id: str) -> bool:
        """Whether a state of the task is stored."""
        return bool(self._ensure_retryable(self._metas, [task_id]))

    def _forget(self, task_id: str) -> None:
        from .result_rows import forget

        alias = self.alias
        retrying.with_retries(alias, lambda: forget(alias, task_id))

    # -- groups --------------------------------------------------------------------------------------------------------

    def _save_group(self, group_id: str, result: Any) -> Any:
        self._keep_group(group_id, result, self.expires)
        return result

    def _keep_group(self, group_id: str, result: Any, expires: Any) -> None:
        from .models import CeleryGroup
        from .result_rows import keep_unfinished

        _check_id(group_id)
        text = self.encode({"result": result.as_tuple() if isinstance(result, ResultBase) else result})
        alias, table = self.alias, CeleryGroup._meta.db_table

        def save() -> None:
            backend_of(connections[alias]).celery_results.save_group(
                connections[alias], table, group_id, text, in_ms(expires)
            )

        retrying.with_retries(alias, save)
        if expires is not self.chord_expires:
            retrying.with_retries(alias, lambda: keep_unfinished(alias, group_id, in_ms(self.chord_expires)))

    def _restore_group(self, group_id: str) -> dict[str, Any] | None:
        from .result_rows import group_of

        alias = self.alias
        row = retrying.with_retries(alias, lambda: group_of(alias, group_id))
        if row is None or row.result is None:
            return None
        found = self.decode(row.result)["result"]
        return {
            "task_id": group_id,
            "result": None if found is None else result_from_tuple(found, self.app),
            "date_done": row.created_at,
        }

    def _delete_group(self, group_id: str) -> None:
        from .result_rows import delete_group

        alias = self.alias
        retrying.in_transaction(alias, lambda: delete_group(alias, group_id))

    # -- waiting -------------------------------------------------------------------------------------------------------

    def wait_for(
        self,
        task_id: str,
        timeout: float | None = None,
        interval: float = 0.5,
        no_ack: bool = True,
        on_interval: Callable[[], Any] | None = None,
        on_message: Callable[[Any], Any] | None = None,
    ) -> dict[str, Any]:
        """The meta data of a task, once it has ended. Raises TimeoutError."""
        for _, meta in self.get_many(
            [task_id], timeout=timeout, interval=interval, on_message=on_message, on_interval=on_interval
        ):
            if on_interval is not None:
                # Celery raises here the exception of an earlier task of the chain, which is the cause. With a chord
                # both results appear at the same time.
                on_interval()
            return meta
        raise AssertionError("unreachable")

    def wait_for_pending(
        self,
        result: Any,
        timeout: float | None = None,
        interval: float = 0.5,
        no_ack: bool = True,
        on_message: Callable[[Any], Any] | None = None,
        on_interval: Callable[[], Any] | None = None,
        callback: Callable[..., Any] | None = None,
        propagate: bool = True,
    ) -> Any:
        """The value of a result, once it is ready. Raises the exception of a failed task."""
        self._ensure_not_eager()
        meta = self.wait_for(result.id, timeout, interval, on_interval=on_interval, on_message=on_message)
        result._maybe_set_cache(meta)
        return result.maybe_throw(propagate=propagate, callback=callback)

    def get_many(
        self,
        task_ids: Iterable[str],
        timeout: float | None = None,
        interval: float = 0.5,
        no_ack: bool = True,
        on_message: Callable[[Any], Any] | None = None,
        on_interval: Callable[[], Any] | None = None,
        max_iterations: int | None = None,
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yields (id, meta data) of each task as it ends. Raises TimeoutError."""
        self._ensure_not_eager()
        waiting = dict.fromkeys(task_ids)
        if not waiting:
            return
        called_at = 0.0
        for poll, passed in enumerate(poll_times(self.alias, waiting, timeout, interval), 1):
            for task_id, meta in self._ended(waiting, on_message):
                waiting.pop(task_id, None)
                yield task_id, meta
            if not waiting or (max_iterations and poll >= max_iterations):
                return
            if on_interval is not None and (passed == 0.0 or passed - called_at >= interval):
                called_at = passed
                on_interval()
        raise TimeoutError("The operation timed out.")

    def _ended(
        self, waiting: dict[str, Any], on_message: Callable[[Any], Any] | None
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yields the tasks that have ended; calls ``on_message`` with each state that is new since the last poll."""
        ids = list(waiting)
        for first in range(0, len(ids), _IDS_PER_STATEMENT):
            batch = ids[first : first + _IDS_PER_STATEMENT]
            cached = {task_id: self._cache[task_id] for task_id in batch if self.is_cached(task_id)}
            found = self._ensure_retryable(self._metas, [task_id for task_id in batch if task_id not in cached])
            for task_id, meta in (cached | found).items():
                if on_message is not None and waiting.get(task_id) != meta["status"]:
                    on_message(meta)
                if task_id in waiting:
                    waiting[task_id] = meta["status"]
                if meta["status"] in states.READY_STATES:
                    if meta["status"] == states.SUCCESS:
                        self._cache[task_id] = meta
                    yield task_id, meta

    # -- maintenance ---------------------------------------------------------------------------------------------------

    def cleanup(self) -> None:
        """Delete expired results: the task ``celery.backend_cleanup``."""
        from .result_rows import delete_old

        delete_old(self.alias)

    def exception_safe_to_retry(self, exc: BaseException) -> bool:
        """Whether the option ``result_backend_always_retry`` retries after this error."""
        return isinstance(exc, DatabaseError) and retrying.is_transient(self.alias, exc)

    def on_backend_retryable_error(self, exc: BaseException) -> None:
        """Close a lost connection, so that the retry opens another."""
        retrying.close_if_lost(self.alias, exc)

    def __reduce__(self, args: Any = (), kwargs: Any = None) -> Any:
        return super().__reduce__(args, {**(kwargs or {}), "url": self.url, "expires": self.expires})


def _alias_of(url: str) -> str:
    """The alias that a URL names; '' if it names none."""
    parts = urlsplit(url)
    alias = parts.netloc
    if parts.scheme != SCHEME or parts.path.strip("/") or parts.query or "@" in alias or ":" in alias:
        raise ImproperlyConfigured(
            f"result_backend = {url!r} is not accepted: use {SCHEME}:// for the database that the router chooses, or "
            f"{SCHEME}://alias for one of DATABASES."
        )
    return alias


def _check_id(identity: Any) -> None:
    from .models import MAX_ID_LENGTH

    if not is_id(identity):
        raise ValueError(f"The id {identity!r:.300} is not accepted: at most {MAX_ID_LENGTH} characters, without NUL.")


def _text(value: Any) -> str:
    return clean(value, 255) if value else ""


log = logging.getLogger("queueapp")

#: Seconds between two polls: the first ones, and the longest while notifications arrive.
FIRST_WAIT, MAX_WAIT = 0.01, 1.0
#: A caller that waits for longer than this many seconds listens for notifications.
LISTEN_AFTER = 0.05
#: Seconds that the listener stays connected without waiters (a longer time would block the dropping of a test
#: database), and seconds after which a failed listener is retried.
LINGER, RETRY_AFTER = 2.0, 30.0
_READ_TIMEOUT = 0.5
_PROBE = "queueapp-listening"


class ResultWaiter:
    """A caller that waits for these tasks."""

    def __init__(self, ids: Collection[str]) -> None:
        self.ids = ids
        self.notified = threading.Event()


class ResultListener:
    """Listens for all callers of this process that wait for results in one database."""

    def __init__(self, alias: str) -> None:
        self.alias = alias
        self.process = os.getpid()
        self._lock = threading.Lock()
        self._waiters: set[ResultWaiter] = set()
        self._thread: threading.Thread | None = None
        self._idle_since = self._failed_at = 0.0
        #: Whether notifications arrive.
        self.established = threading.Event()

    @contextmanager
    def subscribed(self, waiter: ResultWaiter) -> Iterator[None]:
        """Notify a waiter of its tasks meanwhile."""
        with self._lock:
            self._waiters.add(waiter)
            if self._thread is None and (not self._failed_at or monotonic() - self._failed_at > RETRY_AFTER):
                self._thread = threading.Thread(target=self._run, name=f"results of {self.alias}", daemon=True)
                self._thread.start()
        try:
            yield
        finally:
            with self._lock:
                self._waiters.discard(waiter)
                self._idle_since = monotonic()

    def _run(self) -> None:
        failed = True
        try:
            connection = backend_of(connections[self.alias]).celery_results.listener(connections[self.alias].copy())
            if connection is not None:
                with connection:
                    failed = not self._listen(connection)
        except (Error, OSError) as error:
            log.info("Results in %r are polled, not notified: %s", self.alias, str(error).split("\n", 1)[0])
        finally:
            self.established.clear()
            with self._lock:
                self._thread = None
                self._failed_at = monotonic() if failed else 0.0

    def _listen(self, connection: ListenerConnection) -> bool:
        """Listen until there has been no waiter for a while; returns whether notifications arrive."""
        connection.connect()
        connection.listen()
        # Behind a pooler in transaction mode the LISTEN lands on some server connection: nothing ever arrives.
        if not self._probe_succeeds(connection):
            log.info(
                "Results in %r are polled: no notification arrives. Is there a connection pooler in transaction mode?",
                self.alias,
            )
            return False
        self.established.set()
        self._wake_all()  # tasks that ended since the last poll sent no notification to this listener
        while not self._is_idle():
            for payload in connection.received(_READ_TIMEOUT):
                self._wake(payload)
        return True

    def _probe_succeeds(self, connection: ListenerConnection) -> bool:
        # On another connection, as all other notifications.
        sender = connections[self.alias].copy()
        try:
            backend_of(sender).celery_results.notify_waiting(sender, _PROBE)
        finally:
            sender.close()
        deadline = monotonic() + 5
        while monotonic() < deadline:
            if _PROBE in connection.received(0.5):
                return True
        return False

    def _is_idle(self) -> bool:
        with self._lock:
            if self._waiters or monotonic() - self._idle_since < LINGER:
                return False
            self._thread = None  # the next waiter starts another one
            return True

    def _wake(self, task_id: str) -> None:
        with self._lock:
            for waiter in self._waiters:
                if task_id in waiter.ids:
                    waiter.notified.set()

    def _wake_all(self) -> None:
        with self._lock:
            for waiter in self._waiters:
                waiter.notified.set()


listeners: dict[str, ResultListener] = {}
_listeners_lock = threading.Lock()


def listener_of(alias: str) -> ResultListener:
    """The listener of this process."""
    with _listeners_lock:
        found = listeners.get(alias)
        if found is None or found.process != os.getpid():
            found = listeners[alias] = ResultListener(alias)
        return found


def _after_fork() -> None:
    """Forget the threads and connections of the parent."""
    global _listeners_lock
    _listeners_lock = threading.Lock()
    listeners.clear()


os.register_at_fork(after_in_child=_after_fork)


def poll_times(alias: str, ids: Collection[str], timeout: float | None, interval: float) -> Iterator[float]:
    """Yields when to poll for these tasks: now, and whenever one of them may have ended; the value is the seconds since
    the start. Ends after the timeout, with a last poll. ``interval``: the longest wait without notifications."""
    began = monotonic()
    waiter, wait = ResultWaiter(ids), FIRST_WAIT
    yield 0.0
    # A few fast polls first: most results that a caller asks for late exist already.
    while (passed := monotonic() - began) < LISTEN_AFTER:
        remaining = wait if timeout is None else min(wait, timeout - passed)
        if remaining <= 0:
            return
        waiter.notified.wait(remaining)
        yield monotonic() - began
        wait *= 2
    if not settings.NOTIFY:
        yield from _remaining_poll_times(waiter, began, wait, timeout, lambda: interval)
        return
    listener = listener_of(alias)
    with listener.subscribed(waiter):
        longest = lambda: MAX_WAIT if listener.established.is_set() else interval  # noqa: E731
        yield from _remaining_poll_times(waiter, began, wait, timeout, longest)


def _remaining_poll_times(
    waiter: ResultWaiter, began: float, wait: float, timeout: float | None, longest: Callable[[], float]
) -> Iterator[float]:
    while True:
        passed = monotonic() - began
        remaining = min(wait, longest())
        if timeout is not None:
            remaining = min(remaining, timeout - passed)
        if remaining <= 0:
            return
        if waiter.notified.wait(remaining):
            waiter.notified.clear()
        yield monotonic() - began
        wait *= 1.5
