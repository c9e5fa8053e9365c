"""The backend of Django's ``TASKS``."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import lru_cache, partial
from typing import Any

from django.core.checks import CheckMessage
from django.db import transaction
from django.utils import timezone

from ... import messages, registry
from ...errors import InvalidMessage, InvalidOption, UndecodableMessage
from ...options import is_storable
from ...sending.validation import FAR_FUTURE
from .compat import BaseTaskBackend, InvalidTask, TaskResult, TaskResultDoesNotExist, TaskResultStatus, task_enqueued
from .serialization import body_of, headers_of, id_of
from .task_options import ANY, BackendOptions, QueueTask, level_of, refuse_bad_options


class QueueBackend(BaseTaskBackend):
    """Tasks as messages of a queue, enqueued in the caller's transaction.

    >>> TASKS = {"default": {"BACKEND": "queueapp.contrib.tasks.QueueBackend", "QUEUES": ["default", "mail"], "OPTIONS":
    {}}}
    """

    task_class = QueueTask
    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = True

    def __init__(self, alias: str, params: dict[str, Any]) -> None:
        super().__init__(alias, params)
        self.problem: InvalidOption | None = None
        try:
            self._refuse_bad_names()
            self._configuration = BackendOptions(alias, self.options)
        except InvalidOption as error:
            self.problem = error  # reported by a check, and raised when the backend is used
        else:
            self.supports_get_result = self._configuration.keeps_results

    def _refuse_bad_names(self) -> None:
        """Raise InvalidOption for a queue name that cannot be a recipient: Django's queue name is the recipient of its
        tasks."""
        for name in self.queues:
            if not name or not is_storable(name, messages.MAX_RECIPIENT):
                accepted = f"names of 1 to {messages.MAX_RECIPIENT} characters"
                raise InvalidOption(f"TASKS[{self.alias!r}]['QUEUES']", name, accepted)

    @property
    def configuration(self) -> BackendOptions:
        """Its OPTIONS. Raises InvalidOption."""
        if self.problem is not None:
            raise self.problem
        return self._configuration

    @property
    def queue(self) -> Any:
        """The queue of its tasks. Raises QueueNotFound."""
        return registry.queues.find(self.configuration.queue)

    @property
    def worked(self) -> set[str]:
        """The queue names that workers with these settings consume."""
        work = self.configuration.work
        return self.queues if work is None else self.queues.intersection(work)

    def validate_task(self, task: Any) -> None:
        """Django's validation, and that of the task's own options. Raises InvalidTask."""
        super().validate_task(task)
        refuse_bad_options(task)

    # -- enqueueing ----------------------------------------------------------------------------------------------------

    def enqueue(self, task: Any, args: Any, kwargs: Any) -> Any:
        """Store a task in the caller's transaction, or after its commit (OPTIONS["enqueue_on_commit"])."""
        return self._enqueue(task, args, kwargs)

    def enqueue_scheduled(self, task: Any, args: Any, kwargs: Any) -> Any:
        """Store a task in the caller's transaction, which records the run of its schedule."""
        return self._enqueue(task, args, kwargs, at_once=True)

    def _enqueue(self, task: Any, args: Any, kwargs: Any, *, at_once: bool = False) -> Any:
        self.validate_task(task)
        configuration = self.configuration
        _due(task)
        require_known_consumer(task.module_path, tuple(configuration.modules))
        identity = messages.new_id()
        try:
            # TaskResult converts the arguments to JSON values, and refuses others.
            result: Any = TaskResult(
                task=task,
                id=str(identity),
                status=TaskResultStatus.READY,
                enqueued_at=None,
                started_at=None,
                finished_at=None,
                last_attempted_at=None,
                args=args,
                kwargs=kwargs,
                backend=self.alias,
                errors=[],
                worker_ids=[],
            )
        except RecursionError as error:
            raise InvalidMessage(f"The arguments of {task.module_path} cannot be a message body: {error}.") from error
        store = partial(self._store, result, identity, body_of(result.args, result.kwargs))
        if configuration.enqueue_on_commit is not None and not at_once:
            from .results import alias_of

            transaction.on_commit(store, using=configuration.enqueue_on_commit or alias_of(self.queue))
        else:
            store()
        return result

    def _store(self, result: Any, identity: Any, body: bytes) -> None:
        task, queue = result.task, self.queue
        at = _due(task)
        named = task.queue_name if self.queues else ANY
        queue.send(
            body,
            headers=headers_of(task, self.alias),
            at=at,
            priority=level_of(task.priority, queue.delivery.priorities),
            recipient=named if queue.delivery.recipients else "",
            message_id=identity,
            unknown_recipient=True,
        )
        object.__setattr__(result, "enqueued_at", datetime.now(UTC))
        task_enqueued.send(type(self), task_result=result)

    # -- results -------------------------------------------------------------------------------------------------------

    def get_result(self, result_id: Any) -> Any:
        """The current result with this id. Raises TaskResultDoesNotExist."""
        from . import results

        if not self.supports_get_result:
            return super().get_result(result_id)
        queue = self.queue
        identity = id_of(result_id)
        result = results.read_current(queue, results.alias_of(queue), identity) if identity is not None else None
        if result is None:
            raise TaskResultDoesNotExist(result_id)
        return result

    def check(self, **kwargs: Any) -> list[CheckMessage]:
        """The errors and warnings of its settings."""
        from .checks import check_backend

        return [*super().check(**kwargs), *check_backend(self)]


def _due(task: Any) -> datetime | None:
    """When a task is due; None: now. Raises InvalidTask for a time that no store accepts. Called first: a task that is
    stored after the commit could not be refused any more."""
    at = task.run_after
    if at is None:
        return None
    if timezone.is_naive(at):
        at = timezone.make_aware(at)
    now = datetime.now(UTC)  # Django's is naive where USE_TZ is off
    if at > now + FAR_FUTURE:
        raise InvalidTask(f"run_after = {at!r} is not accepted: it must be within 100 years from now.")
    return at.astimezone(UTC) if at > now else None


@lru_cache(maxsize=4096)
def require_known_consumer(path: str, modules: tuple[str, ...]) -> None:
    """Raise InvalidTask for a task that a worker could not import by its path: it would become poison."""
    from .serialization import is_allowed, task_at

    try:
        task_at(path)
    except UndecodableMessage as error:
        raise InvalidTask(str(error)) from error
    module = path.rpartition(".")[0]
    if not is_allowed(module, modules):
        raise InvalidTask(
            f"{path} is not in a package of INSTALLED_APPS, the only ones that a worker imports tasks from: add its "
            "package to OPTIONS['modules'] of the backend."
        )
