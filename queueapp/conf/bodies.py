"""Settings of how bodies are read."""

from __future__ import annotations

from ..options import Option

OPTIONS: tuple[Option, ...] = (
    Option(
        "MAX_DECOMPRESSED",
        int,
        64 * 1024 * 1024,
        "Largest size in bytes of a body after decompression. A larger one is poison, and is never decompressed whole.",
        low=64 * 1024,
        high=2**31 - 1,
    ),
    Option(
        "KEYRING",
        object,
        "queueapp.encryption.from_environment",
        "Callable, or its dotted path, that returns the keys of encrypted bodies by id: the first key encrypts, all "
        "keys decrypt "
        "([encoding](reference/encoding.md#keys)).",
        accept=lambda value: isinstance(value, str) or callable(value),
        words="a callable or the dotted path of one",
    ),
)
