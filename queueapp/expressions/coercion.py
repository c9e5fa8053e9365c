"""The typing rules: what a value counts as where a number, a text or a truth is wanted, and comparisons of two values,
of a value with every element of an array, of two arrays, and with a list (IN).

A value is None (NULL), a bool, an int, a float or a str; the empty string is NULL. Only identifiers yield lists too,
and the operators that look at every element say so; everything else takes the first (``first``).

Texts are compared as texts, numbers as numbers; of a text and a number the text is taken for the number that it says,
and one that says none is greater than any number. With NULL the answer is NULL. With an array it is true when any
element makes it true, as if the elements were joined by OR.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable
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


Compare = Callable[[Any, Any], bool]

COMPARISONS: dict[str, Compare] = {
    "=": operator.eq, "==": operator.eq, "!=": operator.ne, "<>": operator.ne,
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip

#: ``a op b`` is ``b MIRRORED[op] a``.
MIRRORED: dict[Compare, Compare] = {
    operator.eq: operator.eq, operator.ne: operator.ne, operator.lt: operator.gt,
    operator.gt: operator.lt, operator.le: operator.ge, operator.ge: operator.le,
}  # fmt: skip


def any_of(answers: Iterable[bool | None]) -> bool | None:
    """What OR makes of them: TRUE if one is, else NULL if one is, else FALSE."""
    unknown = False
    for answer in answers:
        if answer:
            return True
        unknown = unknown or answer is None
    return None if unknown else False


def compared(compare: Compare, left: Any, right: Any) -> bool | None:
    """Of two values, either of which may be an array."""
    if type(left) is list:
        if type(right) is list:
            return _pairs(compare, left, right)
        return any_of(scalars(compare, element, right) for element in left)
    if type(right) is list:
        return any_of(scalars(compare, left, element) for element in right)
    return scalars(compare, left, right)


def scalars(compare: Compare, left: Any, right: Any) -> bool | None:
    """Of two values that are no arrays."""
    if left is None or right is None:
        return None
    if type(left) is str:
        if type(right) is str:
            return compare(left, right)
        number = number_in(left)
        return compare(number, right) if number is not None else compare(1, 0 if right == right else nan)
    if type(right) is str:
        number = number_in(right)
        return compare(left, number) if number is not None else compare(0 if left == left else nan, 1)
    return compare(left, right)


# -- with a list --------------------------------------------------------------------------------------------------


class Known:
    """Values sorted out by what they can equal, so that looking one up does not cost more the more there are."""

    __slots__ = ("null", "numbers", "texts", "valued")

    def __init__(self, values: Iterable[Any]) -> None:
        self.texts: set[str] = set()
        #: Without NaN, which equals nothing.
        self.numbers: set[Number] = set()
        #: What those texts say that are numbers.
        self.valued: set[Number] = set()
        self.null = False
        for value in values:
            if value is None:
                self.null = True
            elif type(value) is str:
                self.texts.add(value)
                number = number_in(value)
                if number is not None:
                    self.valued.add(number)
            elif value == value:
                self.numbers.add(value)

    def has(self, value: Any) -> bool | None:
        """Whether a value that is no array equals one of them. NULL where a NULL makes that unknown."""
        if type(value) is str:
            if value in self.texts or (self.numbers and number_in(value) in self.numbers):
                return True
        elif value is None:
            return None
        elif value in self.numbers or value in self.valued:
            return True
        return None if self.null else False

    def meets(self, compared: Known) -> bool:
        """Whether any value of the one equals any of the other."""
        return bool(
            self.texts & compared.texts
            or self.numbers & compared.numbers
            or self.numbers & compared.valued
            or self.valued & compared.numbers
        )


# -- of two arrays ------------------------------------------------------------------------------------------------


def _pairs(compare: Compare, left: list[Any], right: list[Any]) -> bool | None:
    """Whether any pair compares so. In the time of reading both: two arrays of 100,000 make too many pairs to try."""
    if compare is operator.eq:
        found = Known(left).meets(Known(right))
    elif compare is operator.ne:
        # Stops at the first pair that differs. Where none does, one of the sides is down to two values (2, and '2').
        left_values, right_values = _distinct(left), _distinct(right)
        found = any(scalars(compare, value, compared_value) for value in left_values for compared_value in right_values)
    else:
        low = compare in (operator.lt, operator.le)
        left_values, right_values = _extremes(left, min if low else max), _extremes(right, max if low else min)
        found = any(scalars(compare, value, compared_value) for value in left_values for compared_value in right_values)
    if found:
        return True
    return None if None in left or None in right else False


def _distinct(values: list[Any]) -> list[Any]:
    return list({(type(value) is str, value): value for value in values if value is not None}.values())


def _extremes(values: list[Any], pick: Any) -> list[Any]:
    """The few values that decide: whatever is true of any value is true of one of these. Which is extreme depends on
    what it is compared with: '9' is greater than '10', and 9 is not.
    """
    numbers = [value for value in values if value is not None and type(value) is not str and value == value]
    texts = [value for value in values if type(value) is str]
    saying = {text: number for text in texts if (number := number_in(text)) is not None}
    chosen: list[Any] = [pick(values) for values in (numbers, texts) if values]
    if saying:
        chosen.append(pick(saying, key=saying.__getitem__))
    chosen += [text for text in texts if text not in saying][:1]
    return chosen
