"""The functions: what they do with values, and how many they take.

They take no arrays but the first element of one (``compiling.py`` sees to it, and has those that differ). NULL among
the arguments makes NULL, unless said otherwise. Positions count characters from 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Context, Decimal
from math import ceil, floor, isfinite, nan
from typing import Any
from zlib import crc32

from .coercion import Number, first, fitting, number_of, text_of
from .parser import MAX_TEXT


@dataclass(frozen=True, slots=True)
class Function:
    """``max_args`` is None where there is no limit. ``takes_null``: it is called with NULLs too."""

    min_args: int
    max_args: int | None
    call: Callable[..., Any]
    takes_null: bool = False


# -- texts --------------------------------------------------------------------------------------------------------


def _upper(value: Any) -> str | None:
    return _cased(value, str.upper)


def _lower(value: Any) -> str | None:
    return _cased(value, str.lower)


def _cased(value: Any, change: Callable[[str], str]) -> str | None:
    """Of ASCII letters only: what a letter is does not depend on the version of Unicode, and no text becomes longer."""
    text = text_of(value) or ""
    if text.isascii():
        return change(text)
    return "".join(change(sign) if sign.isascii() else sign for sign in text)


def _reverse(value: Any) -> str | None:
    return (text_of(value) or "")[::-1]


def _concat(*values: Any) -> str | None:
    """NULLs are left out."""
    texts = [text for value in values if (text := text_of(value)) is not None]
    return "".join(texts) or None if sum(map(len, texts)) <= MAX_TEXT else None


def _substr(value: Any, start: Any, length: Any = None) -> str | None:
    """From a position on; a negative one counts from the end, and 0 is 1."""
    text, begin = text_of(value) or "", _whole(start)
    if begin is None:
        return None
    begin = max(len(text) + begin, 0) if begin < 0 else max(begin - 1, 0)
    if length is None:
        return text[begin:] or None
    count = _whole(length)
    return None if count is None or count <= 0 else text[begin : begin + count] or None


def _replace(value: Any, old: Any, new: Any) -> str | None:
    """Every occurrence; ``new`` may be NULL, as '' is."""
    text, before, after = text_of(value), text_of(old), text_of(new) or ""
    if text is None or before is None:
        return None
    if len(text) + text.count(before) * (len(after) - len(before)) > MAX_TEXT:
        return None
    return text.replace(before, after) or None


def _instr(value: Any, sought: Any) -> int:
    """Where it begins; 0 where it is not."""
    return (text_of(value) or "").find(text_of(sought) or "") + 1


def _instr_i(value: Any, sought: Any) -> int:
    return _instr(_lower(value), _lower(sought))


def _strequal_i(left: Any, right: Any) -> bool:
    return _lower(left) == _lower(right)


def _char_value(code: Any) -> str | None:
    """The character of a code point; NULL where there is none."""
    whole = _whole(code)
    if whole is None or not 0 < whole <= 0x10FFFF or 0xD800 <= whole <= 0xDFFF:
        return None
    return chr(whole)


def _crc32(value: Any) -> int:
    """Of the text in UTF-8, unsigned."""
    return crc32((text_of(value) or "").encode("utf-8", "surrogatepass"))


# -- numbers ------------------------------------------------------------------------------------------------------


def _whole(value: Any) -> int | None:
    """An argument that counts something, cut off towards zero; None when it is not a number."""
    number = number_of(value)
    return int(number) if number is not None and isfinite(number) else None


def _abs(value: Any) -> Number:
    return abs(_number(value))


def _ceiling(value: Any) -> Number:
    number = _number(value)
    return fitting(ceil(number)) if isfinite(number) else number


def _floor(value: Any) -> Number:
    number = _number(value)
    return fitting(floor(number)) if isfinite(number) else number


def _round(value: Any, digits: Any = 0) -> Number | None:
    """To so many decimal places, half away from zero; without any, to a whole number."""
    number, places = _number(value), _whole(digits)
    if places is None:
        return None
    if not isfinite(number) or (type(number) is int and places >= 0) or places > 15:
        return number
    # By its decimal digits: 1.005 is what is written, and as a double it is a little less.
    last = Decimal((0, (1,), -max(places, -400)))
    rounded = Decimal(repr(number)).quantize(last, context=Context(prec=800, rounding=ROUND_HALF_UP))
    return float(rounded) if places > 0 else fitting(int(rounded))


def _number(value: Any) -> Number:
    number = number_of(value)
    return nan if number is None else number


# -- of every element ---------------------------------------------------------------------------------------------


def array_count(value: Any) -> int:
    """How many elements an array has; 1 for a single value, 0 for NULL."""
    return len(value) if type(value) is list else int(value is not None)


def array_to_string(value: Any, separator: Any) -> str | None:
    """The elements that are not NULL, with the separator between them."""
    elements = value if type(value) is list else [value]
    texts = [text for element in elements if (text := text_of(element)) is not None]
    between = text_of(first(separator)) or ""
    if sum(map(len, texts)) + len(between) * len(texts) > MAX_TEXT:
        return None
    return between.join(texts) or None


FUNCTIONS: dict[str, Function] = {
    "ABS": Function(1, 1, _abs),
    "CEILING": Function(1, 1, _ceiling),
    "CHAR_VALUE": Function(1, 1, _char_value),
    "CONCAT": Function(1, None, _concat, takes_null=True),
    "CRC32": Function(1, 1, _crc32),
    "FALSE_VALUE": Function(0, 0, lambda: False),
    "FLOOR": Function(1, 1, _floor),
    "INSTR": Function(2, 2, _instr),
    "INSTR_I": Function(2, 2, _instr_i),
    "LOWER": Function(1, 1, _lower),
    "NAN_VALUE": Function(0, 0, lambda: nan),
    "REPLACE": Function(3, 3, _replace, takes_null=True),
    "REVERSE": Function(1, 1, _reverse),
    "ROUND": Function(1, 2, _round),
    "STREQUAL_I": Function(2, 2, _strequal_i),
    "SUBSTR": Function(2, 3, _substr),
    "TRUE_VALUE": Function(0, 0, lambda: True),
    "UPPER": Function(1, 1, _upper),
}

#: Their arguments are not all evaluated, or are arrays, or they ask for a column: (min_args, max_args) of them.
SPECIAL: dict[str, tuple[int, int | None]] = {
    "ARRAY_COUNT": (1, 1),
    "ARRAY_TO_STRING": (2, 2),
    "COALESCE": (1, None),
    "IF": (3, 3),
    "MESSAGE_SIZE": (0, 0),
    "TOPIC_NAME": (0, 0),
}

#: AMPS refuses these in filters and barriers of queues: a message would match at one time and not at another.
CHANGING = frozenset({"UNIX_TIMESTAMP", "LAST_READ", "VALUE_LOOKUP"})
