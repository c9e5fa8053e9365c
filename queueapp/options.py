"""Declarations of options: name, type, default, bounds and doc, each in one place.

Settings (``conf``), a queue's ``class Delivery`` and ``@consumer(...)`` are lists of these. Checks, docs and ``--help``
are generated from them, so that a bound is never written twice.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from .errors import InvalidOption, UnknownOption, did_you_mean


@dataclass(frozen=True, slots=True)
class Option:
    """One option: how its value is read, what is accepted, and what it means.

    ``seconds=True`` lets a bare number stand for seconds; elsewhere a duration must be a ``timedelta``.
    ``optional=True`` accepts None ("not set").
    """

    name: str
    kind: type
    default: Any
    doc: str
    low: Any = None
    high: Any = None
    optional: bool = False
    seconds: bool = False
    accept: Callable[[Any], bool] | None = None
    #: The accepted values in words, where kind and bounds do not say it.
    words: str = ""

    def read(self, value: Any, where: str = "") -> Any:
        """Return the value in its own type. Raises InvalidOption naming option, value and accepted range."""
        refused = InvalidOption(f"{where}{self.name}", value, self.accepted)
        if value is None and self.optional:
            return None
        try:
            if self.kind is timedelta and self.seconds and type(value) in (int, float):
                value = timedelta(seconds=value)
            if issubclass(self.kind, enum.Enum) and isinstance(value, str | bool):
                value = self.kind(value)
        except (ValueError, OverflowError):  # no such member; not a number, or too many seconds
            names = [member.value for member in self.kind] if issubclass(self.kind, enum.Enum) else []
            if hint := did_you_mean(value, names):
                raise InvalidOption(f"{where}{self.name}", value, f"{self.accepted}; {hint}") from None
            raise refused from None
        if self.kind is float and type(value) is int:
            value = float(value)
        if not isinstance(value, self.kind) or (self.kind not in (bool, object) and isinstance(value, bool)):
            raise refused
        if isinstance(value, float) and math.isnan(value):
            raise refused  # below no bound and above none
        too_low = self.low is not None and value < self.low
        too_high = self.high is not None and value > self.high
        if too_low or too_high or (self.accept is not None and not self.accept(value)):
            raise refused
        return value

    @property
    def accepted(self) -> str:
        """The accepted values in words, for errors and docs."""
        if self.words:
            return self.words
        if issubclass(self.kind, enum.Enum):
            text = "one of " + ", ".join(repr(member.value) for member in self.kind)
        else:
            text = {timedelta: "a timedelta", bool: "True or False", int: "a whole number", float: "a number"}.get(
                self.kind, f"a {self.kind.__name__}"
            )
            if self.kind is timedelta and self.seconds:
                text = "a timedelta or a number of seconds"
        if self.low is not None and self.high is not None:
            text += f" from {self.low} to {self.high}"
        elif self.low is not None:
            text += f" of {self.low} or more"
        elif self.high is not None:
            text += f" of {self.high} or less"
        return text + (", or None" if self.optional else "")


def read_all(
    options: Iterable[Option], given: Mapping[str, Any], where: str, *, aliases: Iterable[str] = ()
) -> dict[str, Any]:
    """Read ``given`` against ``options``; every option is in the result. Raises InvalidOption, for an unknown name
    UnknownOption, which may suggest one of ``aliases`` as well."""
    table = {option.name: option for option in options}
    for name in given:
        if name not in table:
            raise UnknownOption(where, name, given[name], [*table, *aliases])
    return {
        name: option.read(given[name], where) if name in given else option.default for name, option in table.items()
    }


# -- texts that are compared with a column ---------------------------------------------------------------------------


def is_storable(value: Any, longest: int) -> bool:
    """Whether a text column of this length can hold a value: no NUL, and no half of a surrogate pair."""
    if not isinstance(value, str) or len(value) > longest or "\0" in value:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def require_text(name: str, value: Any, longest: int, *, shortest: int = 1) -> str:
    """Return a text that a column of this length can hold, so that it can be looked up. Raises InvalidOption: the
    database's own error would say neither which value it was nor what is accepted."""
    if not is_storable(value, longest) or len(value) < shortest:
        raise InvalidOption(
            name, value, f"a text of {shortest} to {longest} characters, without NUL and halves of surrogate pairs"
        )
    return str(value)
