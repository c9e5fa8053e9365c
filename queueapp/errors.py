"""The errors of queueapp, each with its facts as attributes.

They are raised where the facts are known, and translated once at the edge (a command, the admin, a worker's log line).
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

from django.core.exceptions import ImproperlyConfigured


class QueueError(Exception):
    """Base of all errors of queueapp."""


def shortened(value: Any) -> str:
    """A value for the text of an error; one of 100,000 characters by its beginning."""
    try:
        text = repr(value)
    except (RecursionError, ValueError) as error:  # nested 1,000 deep; an integer of 5,000 digits
        return f"<{type(value).__qualname__}: {error}>"
    return text if len(text) <= 500 else f"{text[:200]}… ({len(text)} characters)"


class InvalidOption(QueueError, ImproperlyConfigured):
    """A setting, a ``Delivery`` option or a consumer option has a value that is not accepted.

    The text names the option, the value and the accepted range, and for a consumer ``where``: file and line of its
    declaration.
    """

    def __init__(self, option: str, value: Any, accepted: str, where: str = "") -> None:
        self.option, self.value, self.accepted, self.where = option, value, accepted, where
        end = "" if accepted.endswith("?") else "."
        super().__init__(
            f"{option} = {shortened(value)} is not accepted: it must be {accepted}{end}" + (where and f" ({where})")
        )

    def at(self, where: str) -> InvalidOption:
        """The same error with the place of the declaration in its text."""
        found = type(self).__new__(type(self))
        found.__dict__.update(self.__dict__)
        found.where, found.args = where, (f"{self} ({where})",)
        return found


class UnknownOption(InvalidOption):
    """A name among settings, ``Delivery`` options or consumer options is no option. ``known``: the names that are."""

    def __init__(self, where: str, name: str, value: Any, known: Iterable[str], advice: str = "") -> None:
        self.known = tuple(sorted(known))
        self.option, self.value, self.where = f"{where}{name}", value, ""
        self.accepted = did_you_mean(name, self.known) or f"known options are {', '.join(self.known)}"
        text = f"{where.rstrip('. :')}: unknown option {name!r}; {self.accepted}"
        QueueError.__init__(self, text + ("" if text.endswith("?") else ".") + advice)


def did_you_mean(name: Any, known: Iterable[str]) -> str:
    """The known name that is most like this one, as a question; '' where none is."""
    from difflib import get_close_matches  # costs 3 ms, and hardly any process makes a mistake

    by_lower = {name.lower().replace("-", "_"): name for name in known if isinstance(name, str)}
    found = get_close_matches(str(name).lower().replace("-", "_"), by_lower, n=1)
    return f"did you mean {by_lower[found[0]]!r}?" if found else ""


class QueueNotFound(QueueError, LookupError):
    """No queue has this name, neither as a label (``app.Model``) nor as a table. ``known``: the labels of all
    queues."""

    def __init__(self, name: str, known: Iterable[str] | None = None) -> None:
        self.name = name
        text = f"There is no queue {name!r}: it is neither a model label (app.Model) nor a queue's table."
        if known is not None:
            labels = sorted(known)
            # A name without its app is the usual mistake.
            short = {label.rpartition(".")[2]: label for label in labels}
            hint = did_you_mean(name, labels) or did_you_mean(short.get(name.strip(), ""), labels)
            text += f" {hint[:1].upper()}{hint[1:]}" if hint else ""
            text += f" Known queues: {', '.join(labels) or 'none'}."
        super().__init__(text)


class TableNotFound(QueueNotFound):
    """A table that a statement needs is not in the database: `migrate` was not run, or the owner of a foreign table has
    not created it."""

    def __init__(self, table: str, alias: str, *, foreign: bool = False) -> None:
        self.name = self.table = table
        self.alias = alias
        text = f"The table {table!r} does not exist in the database {alias!r}"
        if foreign:
            text += ": it belongs to a foreign queue. `migrate` does not create it; its owner does."
        else:
            text += f": run `{migrate_command(alias)}` first (`makemigrations` before it, if the queue is new)."
        LookupError.__init__(self, text)


class NotMigrated(QueueError):
    """Tables or columns that a command needs are not in the database. ``missing`` names them."""

    def __init__(self, alias: str, missing: Sequence[str]) -> None:
        self.alias, self.missing = alias, tuple(missing)
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        super().__init__(f"The database {alias!r} lacks {shown}: run `{migrate_command(alias)}` first.")


def migrate_command(alias: str) -> str:
    """The command that creates what is missing in a database."""
    return "manage.py migrate" + ("" if alias == "default" else f" --database {alias}")


class InvalidMessage(QueueError, ValueError):
    """A message cannot be sent: its body or a header has a wrong type, contains NUL, or is too long."""


class FilteredOut(InvalidMessage):
    """A message was sent to a queue whose filter it does not match. Nothing was stored. (A published message still
    enters the other queues of its topic.)"""

    def __init__(self, queue: str, filter: str) -> None:
        self.queue, self.filter = queue, filter
        super().__init__(f"The message does not match the filter of {queue}, so it cannot be sent to it: {filter}")


class DuplicateMessage(InvalidMessage):
    """A message with this dedupe key is waiting already (``on_conflict="error"``). Nothing was stored. ``waiting``: its
    id."""

    def __init__(self, queue: str, key: str, waiting: Any) -> None:
        self.queue, self.key, self.waiting = queue, key, waiting
        super().__init__(f"A message with dedupe_key = {key!r} is already waiting in {queue}: {waiting}.")


class MessageNotFound(QueueError, LookupError):
    """The message is no longer in the table: it was handled, moved or deleted meanwhile. Nothing was changed."""


class BookmarkNotFound(QueueError, LookupError):
    """The journal has no entry with this bookmark: it was deleted by retention, or never existed."""

    def __init__(self, bookmark: int) -> None:
        self.bookmark = bookmark
        super().__init__(f"The journal has no entry {bookmark}: it was deleted by retention, or never existed.")


class UndecodableMessage(QueueError, ValueError):
    """Headers or body of a received message do not parse. The message becomes poison, with its bytes unchanged."""


class ErasedMessage(UndecodableMessage):
    """The body was encrypted for a subject whose key was destroyed. The receiver discards the message; it is never
    retried."""


class KeyMissing(QueueError, LookupError):
    """The key that a body is encrypted with is not in the keyring, or the keyring is empty. A handler's attempt fails
    with it as with any other error: a later attempt may find a key that is being rolled out."""


class LeaseLost(QueueError):
    """The lease of this message expired and another receiver holds it now, or the message is gone.

    Nothing was changed: an ack, cancel or extend with a stale token touches no row.
    """

    def __init__(self, queue: str, seq: int) -> None:
        self.queue, self.seq = queue, seq
        super().__init__(f"The lease of message {seq} in {queue} expired or was taken over; nothing was changed.")


class NoReply(QueueError, TimeoutError):
    """A request was not answered in time. A later answer stays in its queue until it expires."""

    def __init__(self, queue: str, message_id: uuid.UUID, timeout: timedelta) -> None:
        self.queue, self.message_id, self.timeout = queue, message_id, timeout
        super().__init__(f"Message {message_id} to {queue} was not answered within {timeout}.")


class NoCheckpoint(QueueError):
    """Messages of this queue cannot have checkpoints; nothing was changed."""

    def __init__(self, queue: str, semantics: str) -> None:
        self.queue, self.semantics = queue, semantics
        why = {
            "TRANSACTIONAL": "an attempt is one transaction, so a failed one leaves nothing to continue from",
            "AT_MOST_ONCE": "a message is gone before its handler runs, and there is no second attempt",
        }.get(semantics, "it is not leased")
        super().__init__(f"{queue} is {semantics}, where checkpoints do not work: {why}. Use AT_LEAST_ONCE.")


class MessageCancelled(QueueError):
    """An operator asked the handler of this message to stop (``cancel_running``). It is raised in the handler, which
    may clean up and must let it pass; the message becomes poison or is discarded. It does not count as a failed
    attempt."""

    def __init__(self, reason: str = "", *, discard: bool = False) -> None:
        self.reason, self.discard = reason, discard
        super().__init__(f"cancelled while it was handled: {reason}" if reason else "cancelled while it was handled")


class UnsupportedServer(QueueError):
    """The database server is too old, or lacks a feature that a statement needs. The text names its version."""


class MissingVerb(QueueError, NotImplementedError):
    """The configured delayed store lacks a method that an operation needs; nothing was changed."""

    def __init__(self, store: Any, verb: str) -> None:
        self.store, self.verb = f"{type(store).__module__}.{type(store).__qualname__}", verb
        super().__init__(
            f"The delayed store {self.store} (QUEUEAPP.DELAYED_STORE) has no {verb}(): it must implement "
            f"DelayedStore.{verb} for this."
        )


class SemanticsRefused(InvalidOption, NotImplementedError):
    """The configured delayed store cannot honour the semantics of a queue. Configuration has to change; no later try
    succeeds."""

    def __init__(self, store: Any, semantics: Any, problem: BaseException) -> None:
        path = f"{type(store).__module__}.{type(store).__qualname__}"
        super().__init__(
            "QUEUEAPP.DELAYED_STORE", path, f"a store for {semantics.name} queues, and this one says: {problem}"
        )


class InvalidExpression(QueueError, ValueError):
    """The text of an expression does not parse. ``column`` counts from 1; ``problem`` is what is wrong there.

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


#: Characters of an expression that are shown on either side of the error.
_SHOWN = 60
