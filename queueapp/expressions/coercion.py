"""The typing rules: what a value counts as where a number, a text or a truth is wanted.

A value is None (NULL), a bool, an int, a float or a str; the empty string is NULL. Only identifiers yield lists too,
and the operators that look at every element say so; everything else takes the first (``first``).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from math import fmod, isfinite, nan
from typing import Any

#: What arithmetic takes and gives.
Number = int | float

#: Integers are 64 bits wide, unsigned above the largest signed one. What does not fit is a double.
LEAST, GREATEST = -(2**63), 2**64 - 1

#: ASCII digits only, and nothing around them: ``float`` would take " 1_0 ", "nan" and the digits of every script as
#: well.
_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")

#: Digits of an integer that may fit into 64 bits, with its sign.
_DIGITS = 20


def number_in(text: str) -> Number | None:
    """The number that a text says, or None when it is not one."""
    if _NUMBER.fullmatch(text) is None:
        return None
    if len(text) <= _DIGITS + 1:
        try:
            return fitting(int(text))
        except ValueError:
            pass
    return float(text)  # also an integer of a million digits, which int() takes for ever to read


def fitting(number: int) -> Number:
    """An integer of at most 64 bits as it is, a larger one as a double."""
    if LEAST <= number <= GREATEST:
        return number
    try:
        return float(number)
    except OverflowError:
        return float("inf") if number > 0 else float("-inf")


def settled(value: Any) -> Any:
    """One JSON value that is no list as the language has it. Containers have no value of their own."""
    kind = type(value)
    if kind is str:
        return value or None
    if kind is bool or kind is float:
        return value
    if kind is int:
        return fitting(value)
    # Subclasses, in a body that was made by hand: an enum's member is its value.
    if isinstance(value, str):
        return str.__str__(value) or None
    if isinstance(value, int):
        return fitting(int(value))
    return float(value) if isinstance(value, float) else None


def first(value: Any) -> Any:
    """The first element of an array; any other value as it is."""
    return value[0] if type(value) is list else value


def number_of(value: Any) -> Number | None:
    """As a number: a truth is 1 or 0, a text that says none is NaN, NULL stays NULL."""
    kind = type(value)
    if kind is int or kind is float or value is None:
        return value  # type: ignore[no-any-return]
    if kind is bool:
        return int(value)
    number = number_in(value)
    return nan if number is None else number


def text_of(value: Any) -> str | None:
    """As a text: a truth is 1 or 0, a double the shortest text that says it; NULL stays NULL."""
    if type(value) is str or value is None:
        return value
    return str(int(value)) if type(value) is bool else str(value)


def truth_of(value: Any) -> bool | None:
    """As TRUE, FALSE or NULL: a number is true unless it is 0. What is not a number is neither, and that is NULL."""
    if value is True or value is False or value is None:
        return value
    number = number_of(value)
    return None if number is None or number != number else number != 0


# -- arithmetic ---------------------------------------------------------------------------------------------------

_Operation = Callable[[Any, Any], Number]


def calculated(operation: _Operation, left: Any, right: Any) -> Number | None:
    """Of two values of any type. NaN wins over NULL, and NULL over everything else."""
    a, b = number_of(left), number_of(right)
    if a is None or b is None:
        return nan if a != a or b != b else None
    result = operation(a, b)
    return fitting(result) if type(result) is int else result


def add(a: Number, b: Number) -> Number:
    return a + b


def subtract(a: Number, b: Number) -> Number:
    return a - b


def multiply(a: Number, b: Number) -> Number:
    return a * b


def divide(a: Number, b: Number) -> Number:
    """Of two integers an integer, cut off towards zero. By zero: NaN, whatever the types."""
    if b == 0:
        return nan
    if type(a) is int and type(b) is int:
        quotient = abs(a) // abs(b)
        return quotient if (a < 0) == (b < 0) else -quotient
    return a / b


def remainder(a: Number, b: Number) -> Number:
    """With the sign of the left operand: -5 % 3 is -2."""
    if b == 0 or not isfinite(a):
        return nan
    if type(a) is int and type(b) is int:
        rest = abs(a) % abs(b)
        return -rest if a < 0 else rest
    return fmod(a, b)


ARITHMETIC: dict[str, _Operation] = {
    "+": add, "-": subtract, "*": multiply, "/": divide, "%": remainder, "MOD": remainder,
}  # fmt: skip
