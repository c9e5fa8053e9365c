"""LIKE, BEGINS WITH, ENDS WITH."""

from __future__ import annotations

from typing import Any

import pytest

from queueapp.expressions import InvalidExpression, compile_expression

from .evaluating import value

BODY = {"s": "Hello World", "n": 1234, "null": None, "list": ["ab", "cd"], "plus": "a+b", "unicode": "größe ☃"}


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("/s LIKE 'lo W'", True),
        ("/s LIKE '^lo'", False),
        ("/s LIKE '^Hello World$'", True),
        ("/s LIKE 'hello'", False),
        ("/s LIKE '(?i)hello'", True),
        (r"/s LIKE r'\bWor\w+'", True),
        ("/s NOT LIKE 'x'", True),
        ("/s LIKE 'H.*d'", True),
        (r"/plus LIKE r'a\+b'", True),
        ("/plus LIKE 'a+b'", False),
        ("/n LIKE '23'", True),
        ("/unicode LIKE 'ö.*☃'", True),
        ("/unicode LIKE '^.{7}$'", True),
        ("/null LIKE 'x'", None),
        ("/null NOT LIKE 'x'", None),
        ("/list LIKE '^c'", True),
        ("/list LIKE '^d'", False),
        ("/s LIKE ''", None),
        (r"'a\nb' LIKE 'a.b'", False),
        (r"'a\nb' LIKE '(?s)a.b'", True),
    ],
)
def test_like_searches_a_regular_expression_anywhere(text: str, result: bool | None) -> None:
    assert value(text, BODY) is result


@pytest.mark.parametrize("text", ["/s LIKE /pattern", "/s LIKE UPPER('x')", "/s LIKE 5", "/s LIKE ('a', 'b')"])
def test_a_pattern_is_a_literal(text: str) -> None:
    with pytest.raises(InvalidExpression, match=r"Column 9: .* is not expected here"):
        compile_expression(text)


@pytest.mark.parametrize("pattern", ["(", "a{2000}", "(?=x)", r"(a)\\1", "*", "[z-a]", r"\\pL{300}"])
def test_a_pattern_that_re2_has_not_is_refused_at_its_place(pattern: str) -> None:
    with pytest.raises(InvalidExpression, match="RE2 does not accept this pattern") as refused:
        compile_expression(f"/a = 1 AND /s LIKE '{pattern}'")
    assert refused.value.column == 20


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("/s BEGINS WITH ('Hello')", True),
        ("/s BEGINS WITH ('x', 'He')", True),
        ("/s BEGINS WITH ('hello')", False),
        ("/s begins with ('World')", False),
        ("/s NOT BEGINS WITH ('World')", True),
        ("/s ENDS WITH ('World')", True),
        ("/s ENDS WITH ('x', 'ld')", True),
        ("/s NOT ENDS WITH ('ld')", False),
        ("/s ENDS WITH (/tail)", None),
        ("/n BEGINS WITH (12)", True),
        ("/n ENDS WITH ('34')", True),
        ("/null BEGINS WITH ('x')", None),
        ("/s BEGINS WITH ('He', NULL)", True),
        ("/s BEGINS WITH ('x', NULL)", None),
        ("/list BEGINS WITH ('c')", True),
        ("/s BEGINS WITH (CONCAT('He', 'l'))", True),
    ],
)
def test_begins_with_and_ends_with_take_any_of_several(text: str, result: bool | None) -> None:
    assert value(text, BODY) is result


def test_half_a_surrogate_pair_in_a_body_is_searched_like_any_text() -> None:
    body: Any = {"s": "x\ud800y"}
    assert value("/s LIKE '^x.*y$'", body) in (True, False)
    assert value("/s LIKE 'x'", body) is True
    assert value("CRC32(/s) > 0", body) is True
