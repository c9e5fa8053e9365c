"""The errors a caller of queueapp can meet, each with its facts as attributes.

Raised where the fact is known and translated once at the edge (a command, the admin, a worker's log line).
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

from django.core.exceptions import ImproperlyConfigured


class QueueError(Exception):
    """Base of everything queueapp raises on its own account."""


class InvalidOption(QueueError, ImproperlyConfigured):
    """A setting, a ``Delivery`` option or a consumer option has a value that is not accepted.

    The text names the option, the value and the accepted range, so that it can be mended without reading code, and for a
    consumer ``where``: the file and the line.
    """

    def __init__(self, option: str, value: Any, accepted: str, where: str = "") -> None:
        self.option, self.value, self.accepted, self.where = option, value, accepted, where
        super().__init__(f"{option} = {value!r} is not accepted: it must be {accepted}." + (where and f" ({where})"))


class QueueNotFound(QueueError, LookupError):
    """No queue answers to this name, neither as a label (``app.Model``) nor as a table. ``known``: those that would."""

    def __init__(self, name: str, known: Iterable[str] | None = None) -> None:
        self.name = name
        text = f"There is no queue {name!r}: it is neither a model label (app.Model) nor a queue's table."
        if known is not None:
            text += f" Known queues: {', '.join(sorted(known)) or 'none'}."
        super().__init__(text)


class TableNotFound(QueueNotFound):
    """A table that a statement needs is not in the database: it was not migrated, or whoever owns it has not made it."""

    def __init__(self, table: str, alias: str, *, foreign: bool = False) -> None:
        self.name = self.table = table
        self.alias = alias
        text = f"The table {table!r} does not exist in the database {alias!r}"
        if foreign:
            text += ": it is a foreign queue's, which `migrate` does not make; whoever owns it does."
        else:
            text += f": run `{migrate_command(alias)}` first (`makemigrations` before it, if the queue is new)."
        LookupError.__init__(self, text)


class NotMigrated(QueueError):
    """Tables or columns that a command needs are not in the database. ``missing`` has them in words."""

    def __init__(self, alias: str, missing: Sequence[str]) -> None:
        self.alias, self.missing = alias, tuple(missing)
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        super().__init__(f"The database {alias!r} lacks {shown}: run `{migrate_command(alias)}` first.")


def migrate_command(alias: str) -> str:
    """The command that makes what is missing in a database."""
    return "manage.py migrate" + ("" if alias == "default" else f" --database {alias}")


class InvalidMessage(QueueError, ValueError):
    """A message that was about to be sent cannot be stored: a body or header of the wrong type, a NUL, too long."""


class FilteredOut(InvalidMessage):
    """A message that was sent to a queue whose filter it does not match. Nothing was stored. (What is published enters the other
    queues of its topic.)"""

    def __init__(self, queue: str, filter: str) -> None:
        self.queue, self.filter = queue, filter
        super().__init__(f"The message does not match the filter of {queue}, so it cannot be sent to it: {filter}")


class DuplicateMessage(InvalidMessage):
    """A message with this key waits already (``on_conflict="error"``). Nothing was stored. ``waiting``: the id of that one."""

    def __init__(self, queue: str, key: str, waiting: Any) -> None:
        self.queue, self.key, self.waiting = queue, key, waiting
        super().__init__(f"A message with dedupe_key = {key!r} waits in {queue} already: {waiting}.")


class MessageNotFound(QueueError, LookupError):
    """The message is not where it was looked for: handled, moved, or deleted meanwhile. Nothing was changed."""


class BookmarkNotFound(QueueError, LookupError):
    """The journal has no entry with this bookmark: its retention is over, or there never was one."""

    def __init__(self, bookmark: int) -> None:
        self.bookmark = bookmark
        super().__init__(f"The journal has no entry {bookmark}: its retention is over, or there never was one.")


class UndecodableMessage(QueueError, ValueError):
    """Headers or body of a received message do not parse. The message goes to poison with its bytes untouched."""


class ErasedMessage(UndecodableMessage):
    """The body was encrypted for a subject whose key was destroyed. Whoever receives it discards the message; it is never retried."""


class KeyMissing(QueueError, LookupError):
    """A key that a body is encrypted with is not in the keyring, or there is none to encrypt with. A handler's attempt fails with
    it like with any other error: the next one may find the key, which is being rolled out."""


class LeaseLost(QueueError):
    """The lease of this message lapsed and somebody else owns it now, or the message is gone.

    Nothing was changed: an ack, cancel or extend with a stale token touches no row.
    """

    def __init__(self, queue: str, seq: int) -> None:
        self.queue, self.seq = queue, seq
        super().__init__(f"The lease of message {seq} in {queue} was lost before it was ended; nothing was changed.")


class NoReply(QueueError, TimeoutError):
    """A request was not answered in time. It may be yet: such an answer stays in its queue until it expires."""

    def __init__(self, queue: str, message_id: uuid.UUID, timeout: timedelta) -> None:
        self.queue, self.message_id, self.timeout = queue, message_id, timeout
        super().__init__(f"Message {message_id} to {queue} was not answered within {timeout}.")


class NoCheckpoint(QueueError):
    """A message of this queue cannot keep a checkpoint; nothing was changed."""

    def __init__(self, queue: str, semantics: str) -> None:
        self.queue, self.semantics = queue, semantics
        why = {
            "TRANSACTIONAL": "all that an attempt does is one transaction, so nothing of a failed one stays to go on from",
            "AT_MOST_ONCE": "a message is gone before its handler runs, and there is no second attempt",
        }.get(semantics, "it is not leased")
        super().__init__(f"{queue} is {semantics}, where nothing can be checkpointed: {why}. Use AT_LEAST_ONCE for it.")


class MessageCancelled(QueueError):
    """An operator asked the handler of this message to stop (``cancel_running``). Raised in the handler, which may put things in
    order and lets it pass; and the reason why its message is poison, or gone. No failure of an attempt."""

    def __init__(self, reason: str = "", *, discard: bool = False) -> None:
        self.reason, self.discard = reason, discard
        super().__init__(f"cancelled while it was handled: {reason}" if reason else "cancelled while it was handled")


class UnsupportedServer(QueueError):
    """The database server is too old, or lacks something a statement needs; its version is named."""


class MissingVerb(QueueError, NotImplementedError):
    """The delayed store that is configured cannot do what was asked of it; nothing was changed."""

    def __init__(self, store: Any, verb: str) -> None:
        self.store, self.verb = f"{type(store).__module__}.{type(store).__qualname__}", verb
        super().__init__(
            f"The delayed store {self.store} (QUEUEAPP.DELAYED_STORE) has no {verb}(): it must implement "
            f"DelayedStore.{verb} for this."
        )


class InvalidExpression(QueueError, ValueError):
    """The text of an expression is not one. ``column`` counts from 1; ``problem`` is what is wrong there.

    The text of the error shows the place::

        Column 10: ')' is not expected here.
            /price > ) AND /qty
                     ^
    """

    def __init__(self, text: str, column: int, problem: str) -> None:
        self.text, self.column, self.problem = text, column, problem
        start, end = max(column - 1 - _SHOWN, 0), column - 1 + _SHOWN
        before, after = ("…" if start else ""), ("…" if end < len(text) else "")
        line = before + "".join(sign if sign.isprintable() else " " for sign in text[start:end]) + after
        caret = " " * (column - 1 - start + len(before)) + "^"
        super().__init__(f"Column {column}: {problem}.\n    {line}\n    {caret}")


#: Characters of an expression that are shown on either side of what is wrong with it.
_SHOWN = 60
