"""What the expressions of a queue say of a message that enters it: evaluated once, and kept in columns.

No database, no Django: Spark's executors evaluate the same.
"""

from __future__ import annotations

from math import isfinite
from typing import Any, NamedTuple

from ..errors import InvalidExpression, InvalidOption
from ..messages import BYTES, TOPIC, codec_for, codec_of, decode_body, decode_headers, read_head
from ..messages.body_filters import innermost
from .coercion import number_of
from .compiler import Expression, compile_expression
from .paths import ParsedMessage

#: The priority of what is no number: it is received last.
LOWEST = -(2**63)
HIGHEST = 2**63 - 1


class Evaluated(NamedTuple):
    """What was found. ``priority`` and ``is_barrier`` are None where the queue has no expression for them."""

    matches: bool
    priority: int | None
    is_barrier: bool | None


class EnqueueRules:
    """The expressions of one queue, compiled. Has no state: any number of threads may share it.

    ``target`` is the topic of a message that names none. Raises InvalidOption, with the column, for a text that is no
    expression; ``where`` names the options in it.
    """

    def __init__(
        self,
        where: str,
        *,
        filter: str | None = None,
        priority: str | None = None,
        barrier_expression: str | None = None,
        message_type: str = "json",
        target: str = "",
    ) -> None:
        self._filter = _compiled(where, "filter", filter)
        self._priority = _compiled(where, "priority", priority)
        self._barrier = _compiled(where, "barrier_expression", barrier_expression)
        self._own_codec = codec_of(message_type, f"{where}message_type")
        self._target = target

    def evaluate(self, headers: str, body: bytes | None) -> Evaluated:
        """Of a message as it is stored. Raises UndecodableMessage for headers that do not parse, and for a body that is
        not what they say it is, or, where they say nothing, what the queue's message type is."""
        message = ParsedMessage(self._fields(headers, body), self._topic(headers), len(body or b""))
        return Evaluated(
            self._filter is None or self._filter.matches(message),
            None if self._priority is None else priority_of(self._priority.evaluate(message)),
            None if self._barrier is None else self._barrier.matches(message),
        )

    def _fields(self, headers: str, body: bytes | None) -> Any:
        content_type = read_head(headers)[1]
        if body is None or self._own_codec.content_type == BYTES:
            return None
        if not content_type:
            content_type = self._own_codec.content_type
        plain = innermost(content_type)
        if plain == BYTES:
            return None
        if codec_for(plain) is None and "json" not in plain:
            return None
        return decode_body(bytes(body), content_type)

    def _topic(self, headers: str) -> str:
        return (decode_headers(headers).get(TOPIC) if f'"{TOPIC}"' in headers else None) or self._target


def priority_of(value: Any) -> int:
    """A value as a priority: what is no number (NULL, NaN, a text) is the lowest; what is negative is 0, and what 63
    bits do not hold the highest."""
    number = number_of(value)
    if number is None or number != number:
        return LOWEST
    if not isfinite(number):
        return HIGHEST if number > 0 else 0
    return min(max(int(number), 0), HIGHEST)


def _compiled(where: str, name: str, text: str | None) -> Expression | None:
    if text is None:
        return None
    try:
        return compile_expression(text)
    except InvalidExpression as error:
        raise InvalidOption(f"{where}{name}", text, f"an expression. {error}") from error
