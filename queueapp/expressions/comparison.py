"""Comparisons: of two values, of a value with every element of an array, of two arrays, and with a list (IN).

Texts are compared as texts, numbers as numbers; of a text and a number the text is taken for the number that it says,
and one that says none is greater than any number. With NULL the answer is NULL. With an array it is true when any
element makes it true, as if the elements were joined by OR.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from math import nan
from typing import Any

from .coercion import Number, number_in

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
