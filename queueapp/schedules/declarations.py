"""Declaring schedules in code: ``Queue.schedule`` and ``@scheduled``.

A declaration is checked when its module is imported, and kept in this process. The process that leads the dispatchers
of a database writes it to the table (``stored.declare``).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, TypedDict, TypeVar, Unpack

import msgspec
from django.db import router

from .. import messages
from ..consuming.registry import registered
from ..errors import InvalidOption, did_you_mean
from ..models.delivery import NEVER
from ..models.schedule import Misfire
from ..sending import dedupe
from ..sending.send import build_message
from .timing import OPTIONS, Timing

MAX_NAME, MAX_TAGS = 200, 400
TargetT = TypeVar("TargetT")

#: Options of ``send`` that a schedule may have.
SEND_OPTIONS = (
    "expires_in", "priority", "recipient", "correlation_id", "reply_to", "unknown_recipient", "dedupe_key",
    "on_conflict", "is_barrier",
)  # fmt: skip


class ScheduleOptions(TypedDict, total=False):
    """Arguments of ``Queue.schedule`` and ``@scheduled`` beside name and body: when, and how the message is sent."""

    cron: str
    every: timedelta | float
    at: datetime
    timezone: str
    start: datetime | None
    end: datetime | None
    jitter: timedelta | float | None
    misfire: Misfire | str
    misfire_limit: int
    misfire_grace: timedelta | float
    tags: Iterable[str]
    headers: Mapping[str, str] | None
    expires_in: timedelta | None
    priority: int
    recipient: str
    correlation_id: str | None
    reply_to: str | None
    unknown_recipient: bool
    dedupe_key: str | None
    on_conflict: str | None
    is_barrier: bool


@dataclass(frozen=True)
class Declaration:
    """One schedule that is declared in code: the columns of its row, without its queue."""

    name: str
    columns: Mapping[str, Any]
    #: Returns the queue. A task's is known once all apps are ready.
    find_queue: Callable[[], Any]

    @property
    def alias(self) -> str:
        """The database of its queue, which has its row."""
        return router.db_for_write(self.find_queue())

    @property
    def row(self) -> dict[str, Any]:
        """All columns that the declaration determines."""
        columns = {**self.columns, "queue": self.find_queue()._meta.label}
        text = json.dumps(columns, sort_keys=True, default=str)
        return {**columns, "declared": hashlib.sha256(text.encode()).hexdigest()}


#: The declarations of this process, by name.
declared: dict[str, Declaration] = {}

#: Returns the queue of a task; set by ``queueapp.contrib.tasks``, whose tasks alone can be scheduled.
queue_of_task: Callable[[Any], Any] | None = None


def schedule(queue: Any, body: Any, *, name: str, **options: Unpack[ScheduleOptions]) -> None:
    """Send ``body`` to a queue at certain times, for as long as the call is in the code.

    ``name`` identifies the schedule in its database. ``cron`` has five fields, or six with the seconds first, and is
    read in ``timezone`` (default: ``TIME_ZONE``); ``every`` is an interval, counted from ``start`` or from 1970 UTC;
    ``at`` is a single time. No run has a time before ``start`` or after ``end``. ``jitter`` delays each run by up to so
    much. A run that is more than ``misfire_grace`` late is missed: ``misfire`` "once" sends one message for all missed
    runs, "all" one for each of the newest ``misfire_limit``, "skip" none. ``tags`` are words to find it by. The others
    are arguments of ``send``. Raises InvalidOption, and InvalidMessage for what ``send`` would refuse.

    >>> Orders.schedule(CloseDay(), name="close the day", cron="0 22 * * mon-fri", timezone="Europe/Oslo")
    """
    columns = _columns(name, options)
    given = {key: options[key] for key in SEND_OPTIONS if key in options}  # type: ignore[literal-required]
    if callable(key := given.get("dedupe_key")):
        raise InvalidOption(f"schedule {name!r}: dedupe_key", key, "a text: it is stored")
    headers = options.get("headers")
    refuse_bad_message(queue, body, headers, given)
    if isinstance(body, bytes | bytearray | memoryview):
        raise InvalidOption(f"body of schedule {name!r}", body, "what JSON can hold: it is stored as text")
    # Encoded once, as JSON, whatever the queue's message type is: that is applied by each send.
    data = msgspec.json.encode(body).decode()
    stored = {**messages.type_headers(type(body)), **(headers or {})}
    columns |= {"headers": json.dumps(stored) if stored else "", "body": data, "options": stored_options(given)}
    _add(Declaration(name, columns, lambda: queue))


def scheduled(
    *, name: str = "", body: Any = None, args: Iterable[Any] = (), kwargs: Mapping[str, Any] | None = None,
    **options: Unpack[ScheduleOptions],
) -> Callable[[TargetT], TargetT]:  # fmt: skip
    """Schedule what stands below: a consumer gets a message, a Django task is enqueued. It stays unchanged.

    The message of a consumer is ``body``, by default one made of its message type without arguments; on a queue with
    ``recipients`` it is addressed to this consumer alone. A task gets ``args`` and ``kwargs``. ``name`` is by default
    the consumer's, or the task's path. For the options see ``Queue.schedule``. Raises InvalidOption.

    >>> @scheduled(cron="0 6 * * *", timezone="Europe/Oslo")
    ... @consumer(Reports)
    ... def nightly(message: NightlyReport, context: Context) -> None: ...
    """

    def declare(target: TargetT) -> TargetT:
        if hasattr(target, "module_path") and hasattr(target, "enqueue"):
            _declare_task(target, name, list(args), dict(kwargs or {}), options)
            return target
        found = _registration_of(target)
        if found is None:
            accepted = "above @consumer(...), above a class consumer, or above a Django task"
            raise InvalidOption("@scheduled", target, accepted)
        queue_options = dict(options)
        if found.queue.delivery.recipients:
            queue_options.setdefault("recipient", found.name)
        schedule(found.queue, _body_for(found) if body is None else body, name=name or found.name, **queue_options)  # type: ignore[arg-type]
        return target

    return declare


def _registration_of(target: Any) -> Any:
    """The registration of a function consumer, or of a class consumer; None: it is none."""
    for queue in registered.queues():
        for registration in registered.of(queue):
            if registration.handler is target or type(getattr(registration.handler, "__self__", None)) is target:
                return registration
    return None


def _body_for(registration: Any) -> Any:
    cls = registration.message_type
    if not (isinstance(cls, type) and messages.is_typed(cls)):
        return None
    try:
        return cls()
    except TypeError as error:
        accepted = f"given: {cls.__qualname__} cannot be made without arguments ({error})"
        raise InvalidOption(f"body of @scheduled {registration.name}", None, accepted) from None


def _declare_task(task: Any, name: str, args: list[Any], kwargs: dict[str, Any], options: ScheduleOptions) -> None:
    name = name or task.module_path
    columns = _columns(name, options)
    if refused := sorted({*SEND_OPTIONS, "headers"} & options.keys()):
        accepted = "absent: a task has its own options, given by task.using(...)"
        raise InvalidOption(f"schedule {name!r}: {refused[0]}", options[refused[0]], accepted)  # type: ignore[literal-required]
    try:
        body = json.dumps({"args": args, "kwargs": kwargs})
    except (TypeError, ValueError) as error:
        raise InvalidOption(f"schedule {name!r}: arguments", (args, kwargs), f"JSON values ({error})") from None

    def find_queue() -> Any:
        if queue_of_task is None:
            accepted = "of a backend queueapp.contrib.tasks.QueueBackend, with that app in INSTALLED_APPS"
            raise InvalidOption(f"task of schedule {name!r}", task.module_path, accepted)
        return queue_of_task(task)

    using = {"backend": task.backend, "queue_name": task.queue_name, "priority": task.priority}
    columns |= {"task": task.module_path, "headers": "", "body": body, "options": json.dumps(using)}
    _add(Declaration(name, columns, find_queue))


def checked_name(name: Any) -> str:
    """A name that can be one of a schedule. Raises InvalidOption."""
    # The keys of rows in the admin have the database before a colon.
    accepted = f"a text of 1 to {MAX_NAME} printable characters without ':'"
    if not isinstance(name, str) or not name.strip() or len(name) > MAX_NAME or not name.isprintable() or ":" in name:
        raise InvalidOption("name of a schedule", name, accepted)
    return name


def _columns(name: Any, options: ScheduleOptions) -> dict[str, Any]:
    """The columns that say when. Raises InvalidOption."""
    checked_name(name)
    where = f"schedule {name!r}: "
    known = ScheduleOptions.__annotations__.keys()
    if unknown := sorted(options.keys() - known):
        accepted = _listed(unknown[0], sorted(known))
        raise InvalidOption(f"{where}{unknown[0]}", options[unknown[0]], accepted)  # type: ignore[literal-required]
    numbers = {option.name: option.read(options.get(option.name, option.default), where) for option in OPTIONS}
    try:
        misfire = Misfire(options.get("misfire", Misfire.ONCE))
    except ValueError:
        accepted = _listed(options["misfire"], Misfire.values)
        raise InvalidOption(f"{where}misfire", options["misfire"], accepted) from None
    tags = [options["tags"]] if isinstance(options.get("tags"), str) else list(options.get("tags", ()))
    joined = ",".join(str(tag).strip() for tag in tags)
    if len(joined) > MAX_TAGS or any("," in str(tag) for tag in tags):
        raise InvalidOption(f"{where}tags", tags, f"words without commas, of {MAX_TAGS} characters together")
    timing = Timing(
        options.get("cron", "") or "", numbers.pop("every"), options.get("at"), options.get("timezone", "") or "",
        options.get("start"), options.get("end"),
    )  # fmt: skip
    return {
        **{text: getattr(timing, text) for text in ("cron", "every", "at", "timezone", "start", "end")},
        **numbers,
        "misfire": misfire.value,
        "tags": joined,
        "task": "",
    }


def _listed(given: Any, accepted: Iterable[str]) -> str:
    """The accepted words, and the one that is most like what was given."""
    return "; ".join(filter(None, [f"one of {', '.join(accepted)}", did_you_mean(given, accepted)]))


def refuse_bad_message(queue: Any, body: Any, headers: Mapping[str, str] | None, given: Mapping[str, Any]) -> None:
    """Raise what ``send`` would raise for these arguments, as far as that needs no query."""
    dedupe.refuse_without(queue, key := given.get("dedupe_key"), given.get("on_conflict"))
    if key is not None:
        dedupe.key_of(queue, body, key)
    dedupe.conflict_of(queue, given.get("on_conflict"))
    plain = {key: value for key, value in given.items() if key not in _NOT_COLUMNS}
    build_message(
        queue, body, messages.new_id(), headers, plain.pop("expires_in", None), plain.pop("priority", 0),
        plain.pop("recipient", ""), plain.pop("correlation_id", None), plain.pop("reply_to", None), plain,
    )  # fmt: skip


#: ``NEVER`` in stored options, where other durations are seconds.
_NEVER = "never"
#: Arguments of ``send`` that ``build_message`` does not take.
_NOT_COLUMNS = ("unknown_recipient", "dedupe_key", "on_conflict")


def stored_options(given: Mapping[str, Any]) -> str:
    """Arguments of ``send`` as they are stored; '' where there are none."""
    plain = {name: getattr(value, "value", value) for name, value in given.items()}
    if (expires_in := plain.get("expires_in")) is not None:
        plain["expires_in"] = _NEVER if expires_in == NEVER else expires_in.total_seconds()
    return json.dumps(plain) if plain else ""


def read_options(text: str) -> dict[str, Any]:
    """The inverse of ``stored_options``. Raises InvalidOption."""
    try:
        found = json.loads(text or "{}")
    except ValueError as error:
        raise InvalidOption("options of a schedule", text, f"a JSON object ({error})") from None
    if not isinstance(found, dict) or (unknown := sorted(found.keys() - set(SEND_OPTIONS))):
        accepted = f"a JSON object with some of {', '.join(SEND_OPTIONS)}"
        raise InvalidOption("options of a schedule", unknown if isinstance(found, dict) else text, accepted)
    if (expires_in := found.get("expires_in")) is not None:
        try:
            found["expires_in"] = NEVER if expires_in == _NEVER else timedelta(seconds=expires_in)
        except (TypeError, ValueError, OverflowError):
            accepted = f'a number of seconds up to 100 years, or "{_NEVER}"'
            raise InvalidOption("options of a schedule: expires_in", expires_in, accepted) from None
    return found


def _add(declaration: Declaration) -> None:
    known = declared.get(declaration.name)
    if known is not None and dict(known.columns) != dict(declaration.columns):
        raise InvalidOption("name of a schedule", declaration.name, "of one schedule, and another declaration has it")
    declared[declaration.name] = declaration


def forget(name: str) -> None:
    """Forget a declaration (tests)."""
    declared.pop(name, None)
