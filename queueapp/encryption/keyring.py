"""The project's keys: what ``QUEUEAPP["KEYRING"]`` returns, by id; the first one encrypts, all of them decrypt.

To rotate, put a new key before the others; take an old one away when nothing encrypted with it is left, and no key of a
subject is wrapped by it (``rewrap_subject_keys``). The callable is asked again after a minute, and at once for a key
that is not known, though not more than once a second.
"""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any

from django.utils.module_loading import import_string

from ..conf import settings
from ..errors import InvalidOption, KeyMissing

#: Bytes of a key: AES-256.
LENGTH = 32
#: Seconds until the callable is asked again; and at least, where a key is missing.
KEPT, PATIENCE = 60.0, 1.0
VARIABLE = "QUEUEAPP_ENCRYPTION_KEYS"


def from_environment() -> dict[str, bytes]:
    """Keys of the environment variable ``QUEUEAPP_ENCRYPTION_KEYS``: ``2026-11:<base64>,2026-05:<base64>``. Raises
    InvalidOption."""
    keys = {}
    for entry in os.environ.get(VARIABLE, "").split(","):
        name, colon, text = entry.strip().partition(":")
        if not colon:
            continue
        try:
            keys[name] = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            raise InvalidOption(f"{VARIABLE} key", name, f"followed by ':' and {LENGTH} bytes in base64") from None
    return keys


class _Ring:
    """What the callable said last."""

    def __init__(self) -> None:
        #: None is no source: the first question reads it, and says when that was.
        self.source: Any = None
        self.keys: Mapping[str, bytes] = {}
        self.read_at = 0.0

    def fresh(self, age: float) -> Mapping[str, bytes]:
        source = settings.KEYRING
        if source is not self.source or monotonic() - self.read_at > age:
            self.keys = _checked(source)
            self.source, self.read_at = source, monotonic()
        return self.keys


_ring = _Ring()


def forget() -> None:
    """Ask the callable again (tests)."""
    _ring.__init__()  # type: ignore[misc]


def _checked(source: Any) -> Mapping[str, bytes]:
    """The keys of a callable or of its dotted path. Raises InvalidOption, whose text never contains a key."""
    try:
        call: Callable[[], Any] = import_string(source) if isinstance(source, str) else source
    except ImportError as error:
        raise InvalidOption("QUEUEAPP.KEYRING", source, f"a callable or the dotted path of one ({error})") from error
    keys = call()
    if not isinstance(keys, Mapping):
        raise InvalidOption(
            "QUEUEAPP.KEYRING", source, f"a callable that returns a dict of keys, not {type(keys).__name__}"
        )
    for name, key in keys.items():
        if not isinstance(name, str) or not name or "/" in name or len(name) > 100:
            raise InvalidOption("QUEUEAPP.KEYRING id", name, "a text of 1 to 100 characters without '/'")
        if not isinstance(key, bytes) or len(key) != LENGTH:
            raise InvalidOption("QUEUEAPP.KEYRING key of", name, f"{LENGTH} bytes")
    return dict(keys)


def current() -> tuple[str, bytes]:
    """(id, key) of the one that encrypts. Raises KeyMissing where there is none."""
    for name, key in _ring.fresh(KEPT).items():
        return name, key
    raise KeyMissing("There is no key to encrypt with: QUEUEAPP.KEYRING returned none.")


def key_of(name: str) -> bytes:
    """The key of this id. Raises KeyMissing."""
    key = _ring.fresh(KEPT).get(name)
    if key is None:
        key = _ring.fresh(PATIENCE).get(name)
    if key is None:
        raise KeyMissing(f"The key {name!r} is not in QUEUEAPP.KEYRING.")
    return key
