"""Writes the result of a task whose message the transport discards, in the transaction that removes the message.

    expired, purged, queue deleted        -> REVOKED
    poison without a result of Celery's   -> FAILURE (max_deliveries, a rejected or malformed message)

Without a result every caller of ``get()``, the chain and the chord of the task would wait for ever. The part of the
chord is counted and the error callbacks are called as for any failed task. A result backend other than this package, or
in another database, is written before the commit: it may then say REVOKED of a task whose message is still there, and
is corrected when the task runs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from django.conf import settings as django_settings
from django.db import Error

from ...errors import UndecodableMessage
from .models import BrokerQueue
from .serialization import fields_of

log = logging.getLogger("queueapp")

#: The app of the worker in this process.
_worker_app: Any = None
EXPIRED, PURGED, QUEUE_DELETED = "expired", "purged", "the queue was deleted"


def install() -> None:
    """Write results for the messages that maintenance and operators remove from ``BrokerQueue``."""
    from ...failures import expire_actions

    expire_actions.removal_hooks[BrokerQueue] = on_removal


def use(app: Any) -> None:
    """Write results with this app: that of the worker in this process. None: find one again."""
    global _worker_app
    _worker_app = app


def on_removal(alias: str, rows: Sequence[Any], reason: str) -> None:
    """Revoke the tasks of rows that are removed in the caller's transaction."""
    revoke(alias, ((row.headers, row.body) for row in rows), reason)


def revoke(alias: str, messages: Iterable[tuple[str, Any]], reason: str) -> None:
    """Store REVOKED for the tasks of these messages (headers, body), in the caller's transaction."""
    from celery import states
    from celery.exceptions import TaskRevokedError

    for headers, body in messages:
        _end(headers, body, TaskRevokedError(reason), states.REVOKED)


def fail(headers: str, body: Any, reason: str, *, process_died: bool = False) -> None:
    """Store FAILURE for the task of a message that becomes poison, in the caller's transaction."""
    from celery import states
    from celery.exceptions import TaskError, WorkerLostError

    _end(headers, body, (WorkerLostError if process_died else TaskError)(reason), states.FAILURE)


def _end(headers: str, body: Any, error: Exception, state: str) -> None:
    app = _app()
    if app is None:
        return
    try:
        request = _request_of(app, headers, body)
        if request is not None:
            _store(app, request, error, state)
    except Error:
        raise
    except Exception:
        log.exception(
            "The result of a discarded Celery task could not be stored; callers that wait for it are not notified."
        )


def _store(app: Any, request: Any, error: Exception, state: str) -> None:
    from .results import ResultBackend

    task = app._tasks.get(request.task)
    backend = task.backend if task is not None else app.backend
    ignores = request.ignore_result
    if ignores is None:
        ignores = app.conf.task_ignore_result if task is None else task.ignore_result
    if isinstance(backend, ResultBackend):
        backend.end_discarded(request, error, state, store_result=not ignores)
    else:
        backend.mark_as_failure(request.id, error, request=request, store_result=not ignores, state=state)


def _request_of(app: Any, stored: str, body: Any) -> Any:
    """The request of a message as Celery's result backends read it; None: the message is not a task, or has no valid
    id."""
    from celery.app.task import Context

    from .chords import is_id

    try:
        message, properties = fields_of(stored)
    except UndecodableMessage:
        return None
    headers = message.get("headers") or {}
    if not isinstance(headers, dict) or not isinstance(headers.get("task"), str) or not is_id(headers.get("id")):
        return None
    embed = _embed_of(app, message, body)
    kept = {name: headers.get(name) for name in _FROM_HEADERS}
    return Context(
        kept,
        called_directly=True,
        delivery_info=properties.get("delivery_info") or {},
        correlation_id=properties.get("correlation_id") or headers["id"],
        reply_to=properties.get("reply_to"),
        **{name: embed.get(name) for name in ("callbacks", "errbacks", "chain", "chord")},
    )


_FROM_HEADERS = (
    "task", "id", "root_id", "parent_id", "group", "group_index", "retries", "ignore_result",
    "stamped_headers", "stamps",
)  # fmt: skip


def _embed_of(app: Any, message: Any, body: Any) -> dict[str, Any]:
    """The callbacks, chain and chord of a task; {} if the body is not readable."""
    from kombu.message import Message
    from kombu.serialization import prepare_accept_content

    try:
        _, _, embed = Message(
            body=bytes(body or b""),
            content_type=message.get("content-type"),
            content_encoding=message.get("content-encoding"),
            headers=message["headers"],
            accept=prepare_accept_content(app.conf.accept_content),
        ).decode()
        return dict(embed or {})
    except Exception:
        return {}


def _app() -> Any:
    """The app whose result backend is used: the worker's, the current one, or one made of the CELERY_ settings."""
    if _worker_app is not None:
        return _worker_app
    from celery import _state

    current = _state._tls.current_app or _state.default_app
    candidates = [current] if current is not None else list(_state._get_active_apps())
    for app in candidates:
        if app.conf.result_backend:
            return app
    url = getattr(django_settings, "CELERY_RESULT_BACKEND", None)
    return _app_of_settings(str(url)) if url else None


@cache
def _app_of_settings(url: str) -> Any:
    from celery import Celery

    app = Celery("queueapp", set_as_current=False)
    app.config_from_object("django.conf:settings", namespace="CELERY")
    return app
