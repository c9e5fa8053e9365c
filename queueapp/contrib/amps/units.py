"""Numbers and intervals as AMPS' configuration writes them, and its variables."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import timedelta
from decimal import Decimal

from .diagnostics import NotMapped, shown

_NUMBER = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([a-z]*)", re.IGNORECASE | re.ASCII)
_VARIABLE = re.compile(r"\$\{([^{}]*)\}")

_NANOSECONDS = {
    "ns": 1,
    "us": 10**3,
    "ms": 10**6,
    "s": 10**9,
    "m": 60 * 10**9,
    "h": 3600 * 10**9,
    "d": 86_400 * 10**9,
    "w": 7 * 86_400 * 10**9,
}
_COUNTS = {"": 1, "k": 10**3, "m": 10**6}
_BYTES = ("kb", "mb", "gb", "tb")


def interval(text: str) -> timedelta:
    """``15m`` as a time. Raises NotMapped; what is finer than a microsecond is not rounded away."""
    found = _NUMBER.fullmatch(text)
    unit = found[2].lower() if found else ""
    if found is None or unit not in _NANOSECONDS:
        raise NotMapped(f"{shown(text)!r} is no interval: a number with a unit, one of {', '.join(_NANOSECONDS)}")
    nanoseconds = Decimal(found[1]) * _NANOSECONDS[unit]
    if nanoseconds % 1000:
        raise NotMapped(f"{shown(text)!r} is finer than a microsecond")
    try:
        return timedelta(microseconds=int(nanoseconds // 1000))
    except OverflowError:
        raise NotMapped(f"{shown(text)!r} is longer than {timedelta.max.days} days") from None


def count(text: str) -> int:
    """``10k`` as a number. Raises NotMapped."""
    found = _NUMBER.fullmatch(text)
    unit = found[2].lower() if found else ""
    if unit in _BYTES:
        raise NotMapped(f"{shown(text)!r} counts bytes, and this counts messages")
    if found is None or unit not in _COUNTS:
        raise NotMapped(f"{shown(text)!r} is no whole number, with k or M for a thousand or a million")
    number = Decimal(found[1]) * _COUNTS[unit]
    if number % 1:
        raise NotMapped(f"{shown(text)!r} is no whole number")
    return int(number)


def with_variables(text: str, environment: Mapping[str, str]) -> str:
    """The text with each ``${NAME}`` replaced, once: what is put in is not read again. Raises NotMapped for one that is
    not set."""

    def value(found: re.Match[str]) -> str:
        if found[1] not in environment:
            raise NotMapped(f"the variable ${{{shown(found[1])}}} is not set in the environment of this command")
        text = environment[found[1]]
        if any("\ud800" <= sign <= "\udfff" for sign in text):
            raise NotMapped(f"what the variable ${{{shown(found[1])}}} holds is no text")
        return text

    return _VARIABLE.sub(value, text)
