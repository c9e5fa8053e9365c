"""The expressions of AMPS over a parsed message: filters, and whatever else is computed from a body.

``compile_expression`` parses a text once into closures; what it returns is evaluated on any number of messages, from
any thread. Nothing here reads a database, a file or a clock: the same message always gives the same value. Both the
text and messages are not trusted, so every size that depends on them is bounded (``parser.py``).

Needs the extra ``queueapp[expressions]``. The language is described in ``docs/reference/expressions.md``.
"""

from ..errors import InvalidExpression

try:
    from .compiler import Expression, compile_expression
    from .paths import ParsedMessage
except ModuleNotFoundError as error:  # pragma: no cover: the tests have the extra
    if error.name not in ("lark", "re2"):
        raise
    raise ImportError(
        f"queueapp.expressions needs the extra queueapp[expressions] (lark, google-re2): {error}"
    ) from error

__all__ = ["Expression", "InvalidExpression", "ParsedMessage", "compile_expression"]
