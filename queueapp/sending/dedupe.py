"""Dedupe keys: of the messages of a queue with one key, only one waits.

A message *waits* while it is in the queue or in its delayed store and is not in flight. A message that a handler has
begun does not count: a message sent meanwhile is stored, since the handler may have read older data. A message that
counts is locked until the sender commits, so its handler cannot begin before the data that the ignored message was
about is visible.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from hashlib import blake2b
from itertools import islice
from typing import Any, NamedTuple

from .. import delayed, messages
from ..consuming.registry import registered
from ..errors import DuplicateMessage, InvalidMessage, QueueError, UndecodableMessage, shortened
from ..flow import ledger
from ..messages.ids import as_uuid
from ..models import DelayedMessage, MessageKey
from ..models.delivery.options import OnConflict
from ..models.delivery.topics import content_type_of
from ..sql import backend_of, queue_sql
from ..sql.tables import StoreTable

TABLE: str = MessageKey._meta.db_table
_is_digest = re.compile(r"[0-9a-f]{40}").fullmatch
#: Keys that one statement looks up.
AT_ONCE = 1000

#: A key, or a callable that makes one from a body.
Key = str | Callable[[Any], str | None] | None


def key_of(queue: Any, body: Any, given: Key) -> str | None:
    """The key of a message: the sender's, else the queue's; None: it has none. Raises InvalidMessage."""
    refuse_without(queue, given)
    declared = queue.delivery.dedupe_key
    found = given if given is not None else (declared if callable(declared) else None)
    key = found(body) if callable(found) else found
    if key is not None and (not isinstance(key, str) or not key):
        raise InvalidMessage(
            f"dedupe_key = {shortened(key)} is not accepted: it must be a text that is not empty, or None."
        )
    return key


def refuse_without(queue: Any, given: Key, on_conflict: OnConflict | str | None = None) -> None:
    """Raise InvalidMessage for a key, or what to do about an equal one, on a queue without keys."""
    if queue.delivery.dedupe_key is not None:
        return
    for name, value in (("dedupe_key", given), ("on_conflict", on_conflict)):
        if value is not None:
            raise InvalidMessage(
                f"{name} = {shortened(value)} is not accepted by {queue._meta.label}: its messages have no keys "
                "(Delivery.dedupe_key)."
            )


def conflict_of(queue: Any, given: OnConflict | str | None) -> OnConflict:
    """The sender's ``on_conflict``, else the queue's. Raises InvalidMessage."""
    if given is None:
        return OnConflict(queue.delivery.on_conflict)
    try:
        return OnConflict(given)
    except ValueError:
        accepted = ", ".join(repr(choice.value) for choice in OnConflict)
        raise InvalidMessage(f"on_conflict = {shortened(given)} is not accepted: one of {accepted}.") from None


def admit(queue: Any, connection: Any, key: str, identity: uuid.UUID, conflict: OnConflict) -> uuid.UUID | None:
    """Check a key before a message is stored, in the same transaction. Returns None if the message is to be stored,
    else the id of the waiting message, which stays. Raises DuplicateMessage."""
    return admit_many(queue, connection, {key: identity}, conflict).get(key)


def admit_many(queue: Any, connection: Any, wanted: dict[str, uuid.UUID], conflict: OnConflict) -> dict[str, uuid.UUID]:
    """``admit`` for many keys: the keys whose messages are not to be stored, with the ids of the waiting messages."""
    keys = {digest(key): key for key in wanted}
    kept = _admit(queue, connection, {digest: wanted[key] for digest, key in keys.items()}, conflict)
    if kept and conflict is OnConflict.ERROR:
        found, waiting = next(iter(kept.items()))
        raise DuplicateMessage(queue._meta.label, keys[found], waiting)
    return {keys[digest]: waiting for digest, waiting in kept.items()}


def _admit(queue: Any, connection: Any, ids: dict[str, uuid.UUID], conflict: OnConflict) -> dict[str, uuid.UUID]:
    """``admit_many`` by the digests of keys; with "error" nothing is changed for those that are returned."""
    backend, label = backend_of(connection), queue._meta.label
    named = backend.dedupe.lock_keys(connection, TABLE, label, list(ids), list(ids.values()))
    known = {key: item for key, item in named.items() if item != ids[key]}
    if not known:
        return {}
    # The source of a dispatch first, then its destination: a message that is dispatched meanwhile is seen in one of
    # them.
    store = StoreTable.of(DelayedMessage, "due")
    stored = (
        backend.dedupe.lock_stored(connection, store, label, list(known.values())) if _is_built_in(connection) else []
    )
    sql = queue_sql(queue, connection)
    waiting = sql.claims.lock_waiting(connection, list(known.values()))
    there = {item for _, item in (*stored, *waiting)}
    kept = {key: item for key, item in known.items() if item in there}
    if kept and conflict is OnConflict.ERROR:
        return kept
    if conflict is OnConflict.REPLACE:
        if stored:
            gone = backend.delayed.delete(connection, store, [number for number, _ in stored])
            ledger.count(connection, label, ledger.DELAYED, ledger.MOVED, -gone)
        if waiting:
            sql.failures.remove(connection, [seq for seq, _ in waiting])
        kept = {}
    anew = [key for key in known if key not in kept]
    if anew:
        backend.dedupe.set_keys(connection, TABLE, label, anew, [ids[key] for key in anew])
    return kept


def with_key(headers: str, key: str) -> str:
    """Stored headers with the key that the sender gave, by which ``admit_stored`` knows it. (Of two headers with one
    name the last counts.)"""
    return f'{headers[:-1]}{"," if len(headers) > 2 else ""}"{messages.DEDUPE_KEY}":"{digest(key)}"}}'


class Stored(NamedTuple):
    """A stored message that is to be inserted into a queue: requeued, moved, or copied from the journal."""

    id: uuid.UUID
    headers: str
    body: bytes | None

    @classmethod
    def of(cls, row: Any) -> Stored:
        """A row of the delayed or poison table."""
        return cls(row.message_id, row.headers, row.body)


def admit_stored(
    queue: Any, connection: Any, rows: Sequence[Stored], conflict: OnConflict = OnConflict.IGNORE
) -> list[bool]:
    """Check the keys of stored messages before they are inserted, in the same transaction: whether each is to be
    inserted. Of several with one key the first is, or, with "replace", the last. A key that the sender gave is in a
    header; one that the queue computes is computed from the stored body, decoded for the consumer of this process.
    Raises InvalidMessage if that fails. Does nothing on a queue without keys."""
    if queue.delivery.dedupe_key is None or not rows:
        return [True] * len(rows)
    keys = [_key_of_stored(queue, row, connection.alias) for row in rows]
    chosen: dict[str, int] = {}
    for index, key in enumerate(keys):
        if key is not None and (key not in chosen or conflict is OnConflict.REPLACE):
            chosen[key] = index
    waiting = (
        _admit(queue, connection, {key: rows[index].id for key, index in chosen.items()}, conflict) if chosen else {}
    )
    return [key is None or (chosen[key] == index and key not in waiting) for index, key in enumerate(keys)]


def conflict_of_stored(queue: Any) -> OnConflict:
    """The queue's ``on_conflict`` for messages whose sender is not there to get an error."""
    declared = OnConflict(queue.delivery.on_conflict)
    return OnConflict.IGNORE if declared is OnConflict.ERROR else declared


def _key_of_stored(queue: Any, row: Stored, alias: str) -> str | None:
    """The digest of the key of a stored message; None: it has none."""
    if messages.DEDUPE_KEY in row.headers:
        try:
            if given := messages.decode_headers(row.headers).get(messages.DEDUPE_KEY):
                return given if _is_digest(given) else digest(given)
        except UndecodableMessage:
            return None  # no handler can read it: it becomes poison again
    if not callable(queue.delivery.dedupe_key):
        return None
    try:
        kind = messages.read_kind(row.headers)
        if not kind.content_type:
            kind = kind._replace(content_type=content_type_of(queue))
        consumer = registered.find(queue, kind, "", row.headers)
        known = consumer.knows(kind.names[0]) if consumer is not None and kind.names[0] else None
        body = messages.read_stored(row.body, row.headers, row.id, alias, known or Any, content_type_of(queue))
    except (UndecodableMessage, QueueError):
        return None  # likewise
    try:
        key = key_of(queue, body, None)
    except Exception as error:  # the project's callable
        raise InvalidMessage(
            f"{queue._meta.label}.Delivery.dedupe_key raises {type(error).__name__} for the stored message {row.id}: "
            f"{error}"
        ) from error
    return None if key is None else digest(key)


@lru_cache(maxsize=2 * AT_ONCE)
def digest(key: str) -> str:
    """The stored form of a key. (Cached: of a message of a bulk send it is needed twice.)"""
    return blake2b(key.encode(errors="surrogatepass"), digest_size=20).hexdigest()


def admitted(
    queue: Any,
    connection: Any,
    bodies: Iterable[Any],
    given: Key,
    conflict: OnConflict,
    ids_of: Callable[[int], Sequence[bytes]],
) -> Iterator[tuple[list[Any], list[bytes], list[str | None]]]:
    """The bodies of a bulk send that are to be stored, with their ids and keys, in parts. Of several bodies with one
    key the first is stored, or, for "replace", the last."""
    drawing = iter(bodies)
    while part := list(islice(drawing, AT_ONCE)):
        ids = list(ids_of(len(part)))
        keys = [key_of(queue, body, given) for body in part]
        place: dict[str, int] = {}
        for n, key in enumerate(keys):
            if key is None or (key in place and conflict is OnConflict.IGNORE):
                continue
            if key in place and conflict is OnConflict.ERROR:
                raise DuplicateMessage(queue._meta.label, key, as_uuid(ids[place[key]]))
            place[key] = n
        kept = admit_many(queue, connection, {key: as_uuid(ids[n]) for key, n in place.items()}, conflict)
        chosen = [n for n, key in enumerate(keys) if key is None or (place[key] == n and key not in kept)]
        yield [part[n] for n in chosen], [ids[n] for n in chosen], [keys[n] for n in chosen]


def _is_built_in(connection: Any) -> bool:
    return delayed.is_built_in(delayed.store_of(connection.alias))
