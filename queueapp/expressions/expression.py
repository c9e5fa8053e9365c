"""A compiled expression, and the one way to get one."""

from __future__ import annotations

from functools import lru_cache

from ..errors import InvalidExpression
from .compiler import Compiler, Unusable, as_truth
from .limits import KEPT
from .parser import parse
from .paths import ParsedMessage, Read

#: What an expression evaluates to; None is NULL.
Value = bool | int | float | str | None


class Expression:
    """An expression that is ready to be evaluated. Has no state: any number of threads may share it."""

    __slots__ = ("_answer", "_evaluate", "identifiers", "strict", "text")

    #: As it was written.
    text: str
    #: NULL in AND and OR as in the tables of AMPS.
    strict: bool
    #: The fields that it may look at, as they were written, each once, in order.
    identifiers: tuple[str, ...]

    def __init__(self, text: str, strict: bool, identifiers: tuple[str, ...], evaluate: Read, answer: Read) -> None:
        self.text, self.strict, self.identifiers = text, strict, identifiers
        self._evaluate, self._answer = evaluate, answer

    def evaluate(self, message: ParsedMessage) -> Value:
        """Its value: a number, a text, a truth, or None for NULL; of an array the first element. Never raises."""
        return self._evaluate(message)  # type: ignore[no-any-return]

    def matches(self, message: ParsedMessage) -> bool:
        """Whether it is true of the message. NULL is no match, nor is a value that is neither true nor false (NaN)."""
        return self._answer(message) is True

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"<expression {self.text!r}{' strict' if self.strict else ''}>"


def compile_expression(text: str, *, strict: bool = False) -> Expression:
    """Compile an expression. Raises InvalidExpression, which has the column and shows it.

    NULL in AND and OR is SQL-92's; ``strict`` takes AMPS's documented tables, in which NULL OR TRUE and NULL AND FALSE
    are NULL. The last ``limits.KEPT`` of them are kept, so compiling the same text again costs a look-up.
    """
    if not isinstance(text, str):
        raise TypeError(f"an expression is a str, not {text!r}")
    return _compiled(text, bool(strict))


@lru_cache(maxsize=KEPT)
def _compiled(text: str, strict: bool) -> Expression:
    tree = parse(text)
    compiler = Compiler(strict)
    try:
        evaluate = compiler.scalar(tree)
    except Unusable as unusable:
        raise InvalidExpression(text, unusable.column, unusable.problem) from None
    return Expression(text, strict, tuple(compiler.identifiers), evaluate, as_truth(tree, evaluate))
