"""``publish``: one insert per queue that collects the topic, in the caller's transaction, all of them or none.

If the queues are in several databases there is one transaction in each: an error before the first commit rolls back
all. A ``Recorder`` stores a published message before it is routed, in the same transaction.

Which queues collect a topic is computed from the queues of this process, and cached until another queue is declared.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from datetime import datetime, timedelta
from functools import lru_cache
from itertools import islice
from typing import Any, Protocol, TypedDict, Unpack

from asgiref.sync import sync_to_async
from django.db import connections, transaction

from .. import messages, notifier
from ..errors import FilteredOut, InvalidMessage, shortened
from ..journal.append import Distribution, Journal, is_fed, is_journaled
from ..messages.body_filters import wrapped_anew
from ..models import DelayedMessage
from ..models.delivery import NEVER
from ..models.delivery.topics import MAX_TOPIC, publish_target, topic_name, topic_pattern, underlying_topic
from ..options import is_storable
from ..registry import queues
from ..sending import dedupe, early_acks
from ..sending.bulk import Encoded, encoded, refuse_one_message, runs_for
from ..sending.preparation import refuse_encryption_subject
from ..sending.send import build_message, insert, insert_once, when_due, with_addresses
from ..sending.validation import alias_of, build_outgoing, milliseconds
from ..sql.claims import FOREVER_MS
from ..sql.message_columns import Outgoing, Run
from ..telemetry import tracing


class Recorder(Protocol):
    """Stores published messages: the journal."""

    def keeps(self, topic: str) -> bool:
        """Whether it stores the messages of this topic."""

    def record(self, alias: str, topic: str, published: Sequence[Outgoing], taken: Sequence[Distribution]) -> None:
        """Store the messages, in the open transaction of this database, before they are inserted into queues; ``taken``
        has the queues of each. They have no recipient, and the headers that every queue gets."""


recorders: list[Recorder] = [Journal()]


def record_with(recorder: Recorder) -> None:
    """Add a recorder of everything that this process publishes from now on."""
    if recorder not in recorders:
        recorders.append(recorder)


class PublishOptions(TypedDict, total=False):
    """Arguments of ``publish`` beside topic and body."""

    headers: Mapping[str, str] | None
    delay: timedelta | None
    at: datetime | None
    expires_in: timedelta | None
    correlation_id: str | None
    reply_to: str | None
    message_id: uuid.UUID | None
    unrouted: bool
    using: str | None


_NOTHING: Any = object()


def publish(
    topic: Any,
    body: Any = _NOTHING,
    *,
    headers: Mapping[str, str] | None = None,
    delay: timedelta | None = None,
    at: datetime | None = None,
    expires_in: timedelta | None = None,
    correlation_id: str | None = None,
    reply_to: str | None = None,
    message_id: uuid.UUID | None = None,
    unrouted: bool = False,
    using: str | None = None,
) -> uuid.UUID:
    """Insert a message into every queue that collects ``topic``, in the caller's transaction; returns its id, which is
    the same in each.

    The name of a queue stands for its ``default_publish_target``. With one argument, a typed body, the topic is the
    name of its type. Handlers get the topic in the header ``topic``. A queue whose filter does not match is left out; a
    queue with ``recipients`` gets a copy for each consumer. A topic that no queue collects and no journal keeps is
    refused as a likely misspelling, unless ``unrouted``. The other options are those of ``Queue.send``. Raises
    InvalidMessage, and TableNotFound or NotMigrated before `migrate`.

    >>> publish("orders", {"order": 7})
    >>> publish(OrderPlaced(order=7))
    """
    name, body = _named(topic, body)
    if tracing.tracer is not None and type(headers) is not tracing.Traced:
        given = locals()
        del given["name"]
        return tracing.tracer.send("publish", publish, name, given | {"topic": name})
    identity = message_id or messages.new_id()
    _publish(name, body, identity, headers, delay, at, expires_in, correlation_id, reply_to, unrouted, using)
    return identity


def publish_stored(
    topic: str,
    body: bytes | None,
    *,
    headers: Mapping[str, str],
    using: str,
    original: uuid.UUID,
    correlation_id: str | None = None,
    reply_to: str | None = None,
) -> uuid.UUID:
    """``publish`` of a stored message that must not get lost: raises InvalidMessage if no queue takes it and no journal
    keeps it. An encrypted body stays encrypted, under the new id."""
    identity = messages.new_id()
    stored, body = wrapped_anew(messages.encode_headers(headers), body, None, original, identity, using)
    headers = messages.decode_headers(stored)
    headers.pop(messages.DEDUPE_KEY, None)  # a key of the queue that gave it up
    if not _publish(topic, body, identity, headers, None, None, None, correlation_id, reply_to, False, using, True):
        raise InvalidMessage(f"no queue of the topic {topic!r} has a filter that matches it.")
    return identity


def _publish(
    name: str,
    body: Any,
    identity: uuid.UUID,
    headers: Mapping[str, str] | None,
    delay: timedelta | None,
    at: datetime | None,
    expires_in: timedelta | None,
    correlation_id: str | None,
    reply_to: str | None,
    unrouted: bool,
    using: str | None,
    is_stored: bool = False,
) -> bool:
    """See ``publish``; ``is_stored``: the body is encoded. Returns whether a queue took the message or a journal kept
    it."""
    topic = resolve(name)
    queues = route(topic)
    keepers = _recorders_of(name, topic, queues, unrouted)
    if delay is not None or at is not None:
        when_due(delay, at)  # before anything is stored
    message_headers = _with_topic(with_addresses(headers, correlation_id, reply_to), topic)
    # A delayed message does not come from the journal: it goes to the delayed store.
    by_journal = [queue for queue in queues if delay is None and at is None and is_fed(queue) and is_journaled(topic)]
    prepared, refused = [], []
    for queue in queues:
        try:
            message = build_message(queue, body, identity, message_headers, expires_in, 0, "", correlation_id, reply_to)
        except FilteredOut:
            refused.append(queue)
        else:
            prepared.append((queue, message))
    kept: list[Outgoing] = []
    if keepers:
        _refuse_journaled(queues, topic)
        kind = _message_type(queues)
        kept = [_published(body, identity, message_headers, expires_in, correlation_id, reply_to, kind)]
    databases = _databases(queues, using, bool(keepers))
    with ExitStack() as transactions:
        if keepers or len(prepared) > 1:
            for alias in databases:
                # No savepoint: as after a failed send, the caller's transaction is over.
                transactions.enter_context(transaction.atomic(using=alias, savepoint=False))
        for keeper in keepers:
            for alias, there in databases.items():
                keeper.record(alias, topic, kept, [_distribution(there, by_journal, refused)])
        for queue, message in prepared:
            if queue not in by_journal:
                connection = connections[alias_of(queue, using)]
                if queue.delivery.dedupe_key is None:
                    insert(queue, connection, message, type(body), delay, at)
                elif is_stored:
                    row = dedupe.Stored(identity, message.headers, message.body)
                    if dedupe.admit_stored(queue, connection, [row], dedupe.conflict_of_stored(queue))[0]:
                        insert(queue, connection, message, type(body), delay, at)
                elif (key := dedupe.key_of(queue, body, None)) is None:
                    insert(queue, connection, message, type(body), delay, at)
                else:
                    insert_once(queue, connection, message, type(body), delay, at, key, dedupe.conflict_of(queue, None))
    return bool(prepared or kept)


async def apublish(topic: Any, body: Any = _NOTHING, **options: Unpack[PublishOptions]) -> uuid.UUID:
    """``publish`` for async code; the same arguments, the same transaction rules as Django's async ORM."""
    return await sync_to_async(publish, thread_sensitive=True)(topic, body, **options)


#: Runs that are drawn before they are stored in one queue after the other: 5,000 messages.
_RUNS_AT_ONCE = 20


def publish_many(
    topic: str,
    bodies: Iterable[Any],
    *,
    headers: Mapping[str, str] | None = None,
    expires_in: timedelta | None = None,
    unrouted: bool = False,
    using: str | None = None,
) -> int:
    """``publish`` every body of an iterable by the bulk path; all or nothing, in the caller's transaction if there is
    one.

    Returns how many were published, regardless of how many queues take each. The iterable is drawn lazily, 5,000 at a
    time. Raises InvalidMessage.
    """
    if tracing.tracer is not None and type(headers) is not tracing.Traced:
        return tracing.tracer.send("publish", publish_many, topic, locals())
    refuse_one_message("publish_many", "publish(...)", bodies)
    name, topic = topic, resolve(topic)
    queues = route(topic)
    keepers = _recorders_of(name, topic, queues, unrouted)
    for queue in queues:
        refuse_encryption_subject(queue, headers)
    if keepers:
        _refuse_journaled(queues, topic)
    if any(queue.delivery.dedupe_key is not None for queue in queues):
        return _publish_one_by_one(
            name, bodies, headers, expires_in, unrouted, using, _databases(queues, using, bool(keepers))
        )
    message_headers = _with_topic(with_addresses(headers, None, None), topic)
    by_journal = [queue for queue in queues if is_fed(queue) and is_journaled(topic)]
    likes = {
        queue: build_outgoing(queue, messages.new_id(), "{}", None, expires_in, 0, "", None, None) for queue in queues
    }
    databases = _databases(queues, using, bool(keepers))
    count = 0
    with ExitStack() as transactions:
        for alias in databases:
            transactions.enter_context(transaction.atomic(using=alias))
        every = encoded(bodies, message_headers, _message_type(queues))
        while part := list(islice(every, _RUNS_AT_ONCE)):
            for alias, there in databases.items():
                connection = connections[alias]
                runs: dict[Any, Iterable[Run]] = {
                    queue: runs_for(queue, part, likes[queue], connection, leave_out=True)
                    for queue in there
                    if queue not in by_journal
                }
                if keepers:
                    published = list(_outgoing(part, expires_in))
                    taken = _distributions(published, there, by_journal, runs)
                    for keeper in keepers:
                        keeper.record(alias, topic, published, taken)
                for queue, its_runs in runs.items():
                    early_acks.insert_runs(queue, connection, its_runs, True)
            count += sum(len(run.ids) for run in part)
        if count:
            for alias, there in databases.items():
                for queue in there:
                    if queue not in by_journal:
                        notifier.sent(queue, connections[alias])
    return count


def _publish_one_by_one(
    name: str,
    bodies: Iterable[Any],
    headers: Mapping[str, str] | None,
    expires_in: timedelta | None,
    unrouted: bool,
    using: str | None,
    databases: Iterable[str],
) -> int:
    """With a queue that has keys: which messages it takes depends on those that wait, so they are published one by
    one."""
    count = 0
    with ExitStack() as transactions:
        for alias in databases:
            transactions.enter_context(transaction.atomic(using=alias))
        for body in bodies:
            publish(name, body, headers=headers, expires_in=expires_in, unrouted=unrouted, using=using)
            count += 1
    return count


def _named(topic: Any, body: Any) -> tuple[str, Any]:
    """The given topic, and the body."""
    if body is not _NOTHING:
        return topic, body
    name = messages.type_name_of(type(topic))
    if not name:
        raise InvalidMessage(
            f"publish({shortened(topic)}) names no topic: a {type(topic).__qualname__} has no type to take one from (a "
            "msgspec.Struct or a dataclass has). Write publish(topic, body)."
        )
    return name, topic


def _recorders_of(name: str, topic: str, queues: Sequence[Any], unrouted: bool) -> list[Recorder]:
    """The recorders of this topic. Raises InvalidMessage if there is none and no queue collects it."""
    keepers = [recorder for recorder in recorders if recorder.keeps(topic)]
    if not queues and not keepers and not unrouted:
        said = repr(name) if name == topic else f"{name!r} (published to {topic!r})"
        topics = known_topics()
        raise InvalidMessage(
            f"topic = {said} is not accepted: no queue collects it. Known: "
            f"{', '.join(topics[:20])}{', …' if len(topics) > 20 else ''}. "
            "To publish all the same: unrouted=True."
        )
    return keepers


def _refuse_journaled(queues: Sequence[Any], topic: str) -> None:
    """Raise InvalidMessage if the journal would store in the clear what one of the queues encrypts."""
    for queue in queues:
        if queue.delivery.encrypts:
            raise InvalidMessage(
                f"topic = {topic!r} is not accepted: {queue._meta.label}, which collects it, encrypts its bodies, and "
                "the journal would keep them in the clear."
            )


def _databases(queues: Sequence[Any], using: str | None, kept: bool) -> dict[str, list[Any]]:
    """The databases in which a row is stored, and the queues there."""
    databases: dict[str, list[Any]] = {}
    for queue in queues:
        databases.setdefault(alias_of(queue, using), []).append(queue)
    if kept and not databases:
        databases[alias_of(DelayedMessage, using)] = []  # the database of the tables that all queues share
    return databases


def _distribution(there: Sequence[Any], by_journal: Sequence[Any], refused: Sequence[Any]) -> Distribution:
    """The distribution of one message in one database."""
    return Distribution(
        tuple(queue for queue in there if queue not in by_journal and queue not in refused),
        tuple(queue for queue in there if queue in by_journal and queue not in refused),
        tuple(queue for queue in there if queue in refused),
    )


def _distributions(
    published: Sequence[Outgoing], there: Sequence[Any], by_journal: Sequence[Any], runs: dict[Any, Iterable[Run]]
) -> list[Distribution]:
    """The same for many messages. Draws the runs of queues with expressions, which decide what enters them."""
    entering: dict[Any, set[bytes]] = {}
    for queue in runs:
        if queue.delivery.has_expressions:
            runs[queue] = drawn = list(runs[queue])
            entering[queue] = {identity for run in drawn for identity in run.ids}
    everything = _distribution(there, by_journal, ())
    if not entering:
        return [everything] * len(published)
    known: dict[tuple[Any, ...], Distribution] = {}
    taken = []
    for message in published:
        refused = tuple(queue for queue, ids in entering.items() if message.id.bytes not in ids)
        if refused not in known:
            known[refused] = _distribution(there, by_journal, refused)
        taken.append(known[refused])
    return taken


def _with_topic(headers: Mapping[str, str] | None, topic: str) -> dict[str, str]:
    try:
        return {messages.TOPIC: topic} | dict(headers or {}) | {messages.TOPIC: topic}
    except (TypeError, ValueError):
        raise InvalidMessage(f"headers = {shortened(headers)} is not accepted: it must be a dict of strings.") from None


def _message_type(queues: Sequence[Any]) -> str:
    """The message type of a topic: that of its queues, which a system check keeps equal."""
    return queues[0].delivery.message_type if queues else "json"


def _published(
    body: Any,
    identity: uuid.UUID,
    headers: Mapping[str, str],
    expires_in: timedelta | None,
    correlation_id: str | None,
    reply_to: str | None,
    message_type: str,
) -> Outgoing:
    """A message as it is journaled, for no queue in particular."""
    stored, data = messages.encode(body, headers, message_type)
    return Outgoing(identity, stored, data, _lifetime(expires_in), "", 0, correlation_id, reply_to)


def _outgoing(messages: Iterable[Encoded], expires_in: timedelta | None) -> Iterator[Outgoing]:
    lifetime = _lifetime(expires_in)
    for message in messages:
        for identity, body in zip(message.ids, message.bodies, strict=True):
            yield Outgoing(uuid.UUID(bytes=identity), message.headers, body, lifetime)


def _lifetime(expires_in: timedelta | None) -> int | None:
    if expires_in == NEVER:
        return FOREVER_MS
    return None if expires_in is None else milliseconds("expires_in", expires_in, low=1)


#: Topics whose queues are cached. Publishers may use any names, so not all are.
_KEPT = 4096


class _Routes:
    """All queues, by the topics that they collect."""

    def __init__(self) -> None:
        #: Every publisher inserts in the order of declaration, so that two of them never lock in opposite orders.
        self._order: dict[Any, int] = {}
        self._by_topic: dict[str, list[Any]] = {}
        self._by_pattern: list[tuple[re.Pattern[str], Any]] = []
        self._by_name: dict[str, Any] = {}
        for queue in queues:
            self._order[queue] = len(self._order)
            self._by_name.setdefault(topic_name(queue), queue)
            pattern = topic_pattern(queue)
            if pattern is None:
                self._by_topic.setdefault(underlying_topic(queue), []).append(queue)
            else:
                self._by_pattern.append((pattern, queue))

    def target(self, name: str) -> str:
        queue = self._by_name.get(name)
        return name if queue is None else publish_target(queue)

    def of(self, topic: str) -> tuple[Any, ...]:
        found = [*self._by_topic.get(topic, ())]
        found += [queue for pattern, queue in self._by_pattern if pattern.search(topic)]
        return tuple(sorted(found, key=self._order.__getitem__))


@lru_cache(maxsize=1)
def _routes(version: tuple[int, int]) -> _Routes:
    return _Routes()


@lru_cache(maxsize=_KEPT)
def _route(version: tuple[int, int], topic: str) -> tuple[Any, ...]:
    return _routes(version).of(topic)


def resolve(name: str) -> str:
    """The topic of a message published under this name: the name of a queue stands for its ``default_publish_target``.
    Raises InvalidMessage for an invalid topic.

    >>> resolve("Orders")
    'Orders'
    """
    if not name or not is_storable(name, MAX_TOPIC):
        raise InvalidMessage(
            f"topic = {shortened(name)} is not accepted: a string of 1 to {MAX_TOPIC} characters, without NUL and "
            "halves of surrogate pairs."
        )
    return _routes(queues.version).target(name)


def route(topic: str) -> tuple[Any, ...]:
    """The queues that collect a topic, in the order of their declaration. The name of a queue is no topic by itself:
    see ``resolve``.

    >>> route("Orders")
    (<class 'shop.models.Orders'>,)
    """
    return _route(queues.version, topic)


def known_topics() -> list[str]:
    """The names for error messages: of queues, and of topics that queues collect by name."""
    routes = _routes(queues.version)
    return sorted({*routes._by_name, *routes._by_topic})


def forget() -> None:
    """Clear the cache (tests that change the options of a queue)."""
    _routes.cache_clear()
    _route.cache_clear()
