"""What is written down of a failure: the exception, the place, the process, and the history of attempts.

Exceptions, policies and headers are other people's: whatever they hold or do when they are asked, what comes out of
here is short text that every column takes.
"""

from __future__ import annotations

import hashlib
import os
import socket
import threading
import traceback
from datetime import MAXYEAR, UTC, datetime
from typing import Any

import msgspec
from django.utils.dateparse import parse_datetime

from .. import messages
from ..errors import UndecodableMessage
from ..version import VERSION

#: Longest exception message and traceback kept, in characters (NServiceBus cuts at the same place).
MAX_TEXT = 16_384


class ProcessDied(Exception):
    """The process ended while a handler had the message: the "exception" of such an attempt."""


#: How an attempt that ended its process begins in the history.
_DIED = f'"exception":"{ProcessDied.__name__}: '

#: Failed attempts kept with a message: the first show the cause, the last are current.
MAX_FAILURES = 20


def describe(exception: BaseException) -> dict[str, str]:
    """The columns of the poison table for an exception: bounded, and without NULs, which PostgreSQL
    refuses."""
    kind = f"{type(exception).__module__}.{type(exception).__qualname__}".removeprefix("builtins.")
    place = text = ""
    try:
        frames = traceback.extract_tb(exception.__traceback__)
        # The place a developer would name: where it was raised, not by which worker loop it was called.
        place = f"{frames[-1].filename}:{frames[-1].name}" if frames else ""
        text = "".join(traceback.format_exception(exception))
    except BaseException as error:
        text = f"(it could not be formatted: {type(error).__name__})"
    return {
        "exception_type": clean(kind, 255),
        "exception_message": clean(_words_of(exception), MAX_TEXT),
        # The end of a traceback says what happened; a recursion's middle says nothing.
        "traceback": clean(
            text if len(text) <= MAX_TEXT else text[:2000] + "\n…\n" + text[-(MAX_TEXT - 2010) :], MAX_TEXT
        ),
        "group_key": hashlib.sha256(f"{kind}@{place}".encode(errors="replace")).hexdigest()[:32],
    }


def where() -> dict[str, str]:
    """The columns for this process."""
    return {
        "host": clean(socket.gethostname(), 255),
        "process": clean(f"{os.getpid()}:{threading.current_thread().name}", 64),
        "worker_version": clean(os.environ.get("QUEUEAPP_WORKER_VERSION", VERSION), 64),
    }


def clean(text: Any, limit: int) -> str:
    """Anything as a text of at most ``limit`` UTF-16 units, which is what SQL Server counts, that every database
    takes."""
    try:
        text = str(text)
    except BaseException as error:  # sys.exit() in there is no reason to end a worker
        text = f"(its __str__ raised {type(error).__name__})"
    # Lone surrogates come from undecodable file names in messages of OSError; no database takes them.
    text = text[:limit].replace("\0", "\ufffd").encode("utf-8", "replace").decode()
    if len(text) * 2 > limit and len(text.encode("utf-16-le")) > 2 * limit:
        text = text.encode("utf-16-le")[: 2 * limit].decode("utf-16-le", "ignore")
    return text


def one_line(exception: BaseException) -> str:
    """An exception in one line, bounded."""
    return clean(f"{type(exception).__name__}: {_words_of(exception)}".split("\n", 1)[0], 400)


def _words_of(exception: BaseException) -> str:
    # The failure has to be kept, whatever its class makes of being shown.
    return clean(exception, 4 * MAX_TEXT)


def type_of(headers: str) -> str:
    """The message type that stored headers name; '' when they do not parse."""
    try:
        return clean(messages.read_head(headers)[0], 255)
    except UndecodableMessage:
        return ""


# -- the history ---------------------------------------------------------------------------------------------------


def read_failures(failures: str | None) -> list[Any]:
    """The history of failed attempts, oldest first; [] when there is none or it does not parse."""
    try:
        history = msgspec.json.decode(failures or "[]")
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return []
    return history if isinstance(history, list) else []


def attempts_of(failures: str | None) -> int:
    """How many attempts of a message have failed so far, as its history says: the count that outlives everything."""
    if failures is None:
        return 0
    history = read_failures(failures)
    number = history[-1].get("attempt") if history and isinstance(history[-1], dict) else None
    return max(0, number) if isinstance(number, int) else 0


def records_a_death(failures: str | None) -> bool:
    """Whether an attempt ended with its process, as the history says."""
    return failures is not None and _DIED in failures


def append(
    failures: str | None, exception: BaseException, attempt: int, verdict: str, poisoned_at: int | None = None
) -> str:
    """The history with one more failed attempt; the middle of a long one is dropped. ``poisoned_at``: the deliveries of
    a message that becomes poison."""
    entry = {"attempt": attempt, "exception": one_line(exception), "verdict": verdict}
    return _with(failures, entry if poisoned_at is None else entry | {"deliveries": poisoned_at})


def is_moved_back(failures: str | None, deliveries: int) -> bool:
    """Whether a message was poison, was moved back to a queue by SQL with its counts, and was not delivered since."""
    if failures is None or '"Poison"' not in failures:
        return False
    history = read_failures(failures)
    last = history[-1] if history and isinstance(history[-1], dict) else {}
    return last.get("verdict") == "Poison" and last.get("deliveries") == deliveries


def reset_attempts(failures: str | None, attempts: int) -> str:
    """The history of a message that is requeued as if so many attempts had failed."""
    return _with(failures, {"attempt": attempts, "exception": "", "verdict": "Requeued"})


def _with(failures: str | None, entry: dict[str, Any]) -> str:
    history = read_failures(failures)
    if len(history) >= MAX_FAILURES:
        del history[MAX_FAILURES // 2]
    # The time is for people to read; nothing is ever compared with it, so a host's clock will do.
    history.append({"at": datetime.now(UTC).isoformat(), **entry, **where()})
    return msgspec.json.encode(history).decode()


def first_failed(failures: str | None) -> datetime | None:
    """When the first attempt in a history failed; None where it does not say."""
    history = read_failures(failures)
    at = history[0].get("at") if history and isinstance(history[0], dict) else None
    try:
        first = parse_datetime(at) if isinstance(at, str) else None
        if first is not None:
            first = first.replace(tzinfo=UTC) if first.tzinfo is None else first.astimezone(UTC)
    except (ValueError, OverflowError):
        return None
    # At the ends of time it would be another time zone's turn to overflow.
    return first if first is not None and 1 < first.year < MAXYEAR else None
