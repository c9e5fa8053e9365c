"""What an expression makes of a body, in one call."""

from __future__ import annotations

from typing import Any

from queueapp.expressions import ParsedMessage, compile_expression


def value(text: str, body: Any = None, *, strict: bool = False, topic: str = "", size: int | None = None) -> Any:
    """The value; True and 1 are distinguished by `is`."""
    return compile_expression(text, strict=strict).evaluate(ParsedMessage(body, topic, size))


def matches(text: str, body: Any = None, *, strict: bool = False) -> bool:
    return compile_expression(text, strict=strict).matches(ParsedMessage(body))


def shown(result: Any) -> str:
    """With its type, so that True is not 1 and 1 is not 1.0."""
    return f"{type(result).__name__} {result!r}"
