"""Values as Python writes them, in the form that a formatter leaves alone."""

from __future__ import annotations

from datetime import timedelta

LINE = 120


def text_literal(text: str) -> str:
    """A string; in double quotes unless single ones save a backslash. What cannot be printed is escaped.

    >>> print(text_literal('/a = "x"'), text_literal("it's"))
    '/a = "x"' "it's"
    """
    # With a double quote in it, repr always takes single ones.
    inside = repr('"' + text)[2:-1]
    if text.count('"') > text.count("'"):
        return f"'{inside}'"
    return '"' + inside.replace("\\'", "'").replace('"', '\\"') + '"'


def time_literal(time: timedelta) -> str:
    """A timedelta in the largest unit that it is a whole number of.

    >>> time_literal(timedelta(seconds=900)), time_literal(timedelta(microseconds=1_500_000))
    ('timedelta(minutes=15)', 'timedelta(milliseconds=1500)')
    """
    for unit in ("days", "hours", "minutes", "seconds", "milliseconds", "microseconds"):
        whole, rest = divmod(time, timedelta(**{unit: 1}))
        if not rest and (whole or unit == "seconds"):
            return f"timedelta({unit}={whole})"
    raise AssertionError("a timedelta has no part below a microsecond")


def assignment(name: str, source: str, indent: int) -> list[str]:
    """``name = source``; in parentheses where that makes it fit into a line."""
    line = f"{' ' * indent}{name} = {source}"
    if len(line) > LINE and indent + 4 + len(source) <= LINE:
        return [f"{' ' * indent}{name} = (", f"{' ' * (indent + 4)}{source}", f"{' ' * indent})"]
    return [line]
