"""What is written down of a failure: the exception, the place, the process, and the history of attempts."""

from __future__ import annotations

import hashlib
import os
import socket
import threading
import traceback
from typing import Any

import msgspec
from django.utils import timezone

from .. import messages
from ..errors import UndecodableMessage
from ..version import VERSION

#: Longest exception message and traceback kept, in characters (NServiceBus cuts at the same place).
MAX_TEXT = 16_384

#: Failed attempts kept with a message: the first ones tell most, the last ones are current.
MAX_FAILURES = 20


def describe(exception: BaseException) -> dict[str, str]:
    """The columns of the poison table that tell of an exception: bounded, and without NULs, which PostgreSQL refuses."""
    frames = traceback.extract_tb(exception.__traceback__)
    kind = f"{type(exception).__module__}.{type(exception).__qualname__}".removeprefix("builtins.")
    # The place a developer would name: where it was raised, not by which worker loop it was called.
    place = f"{frames[-1].filename}:{frames[-1].name}" if frames else ""
    text = "".join(traceback.format_exception(exception))
    return {
        "exception_type": kind[:255],
        "exception_message": _clean(_words_of(exception), MAX_TEXT),
        # The end of a traceback says what happened; a recursion's middle says nothing.
        "traceback": _clean(
            text if len(text) <= MAX_TEXT else text[:2000] + "\n…\n" + text[-(MAX_TEXT - 2010) :], MAX_TEXT
        ),
        "group_key": hashlib.sha256(f"{kind}@{place}".encode()).hexdigest()[:32],
    }


def where() -> dict[str, str]:
    """The columns that tell of this process."""
    return {
        "host": socket.gethostname()[:255],
        "process": f"{os.getpid()}:{threading.current_thread().name}"[:64],
        "worker_version": os.environ.get("QUEUEAPP_WORKER_VERSION", VERSION)[:64],
    }


def _clean(text: str, limit: int) -> str:
    # Lone surrogates come from undecodable file names in messages of OSError; no database takes them.
    return text.replace("\0", "\ufffd").encode("utf-8", "replace").decode()[:limit]


def one_line(exception: BaseException) -> str:
    """An exception in one line, bounded."""
    return _clean(f"{type(exception).__name__}: {_words_of(exception)}".split("\n", 1)[0], 400)


def _words_of(exception: BaseException) -> str:
    try:
        return str(exception)
    except Exception as error:
        # The failure has to be kept, whatever its class makes of being shown.
        return f"(its __str__ raised {type(error).__name__})"


def type_of(headers: str) -> str:
    """The message type that stored headers name; '' when they do not parse."""
    try:
        return messages.read_head(headers)[0][:255]
    except UndecodableMessage:
        return ""


def read_failures(failures: str | None) -> list[dict[str, Any]]:
    """The history of failed attempts, oldest first; [] when there is none or it does not parse."""
    try:
        history = msgspec.json.decode(failures or "[]")
    except msgspec.DecodeError:
        return []
    return history if isinstance(history, list) else []


def append(failures: str | None, exception: BaseException, attempt: int, verdict: str, at: Any = None) -> str:
    """The history with one failed attempt more; the middle of a long one is dropped."""
    history = read_failures(failures)
    if len(history) >= MAX_FAILURES:
        del history[MAX_FAILURES // 2]
    history.append(
        {
            "at": at or _utc_now(),
            "attempt": attempt,
            "exception": one_line(exception),
            "verdict": verdict,
            **where(),
        }
    )
    return msgspec.json.encode(history).decode()


def _utc_now() -> str:
    # For people to read; nothing is ever compared with it, so a host's clock will do.
    return timezone.now().isoformat()


def first_failed(failures: str) -> str | None:
    """When the first attempt in a history failed."""
    history = read_failures(failures)
    return history[0]["at"] if history else None
