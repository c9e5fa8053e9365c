"""Expressions and bodies that mean harm: they are refused, or evaluated in bounded time and memory."""

from __future__ import annotations

from time import process_time
from typing import Any

import pytest

from queueapp.expressions import InvalidExpression, compile_expression
from queueapp.expressions.parser import MAX_DEPTH, MAX_LENGTH, MAX_PATTERNS, MAX_TEXT

from .evaluating import value

#: CPU seconds: far more than any of these takes (milliseconds, mostly), and far less than what has no bound.
PATIENCE = 20.0


@pytest.fixture(autouse=True)
def in_bounded_time() -> Any:
    started = process_time()
    yield
    assert process_time() - started < PATIENCE


@pytest.mark.parametrize(
    "text",
    [
        "(" * 10_000 + "1" + ")" * 10_000,
        "(" * 10_000,
        "NOT " * 10_000 + "1",
        "/a" * 10_000,
        "'" * 10_001,
        "1" + " + 1" * 10_000,
    ],
    ids=["parentheses", "open parentheses", "NOTs", "steps", "quotes", "sum"],
)
def test_a_text_that_is_too_long_is_refused_unread(text: str) -> None:
    with pytest.raises(InvalidExpression, match=f"at most {MAX_LENGTH} characters"):
        compile_expression(text)


DEEP = {
    "parentheses": "{}1{}".format("(" * 2_000, ")" * 2_000),
    "functions": "{}1{}".format("ABS(" * 700, ")" * 700),
    "NOTs": "NOT " * 1_000 + "1",
    "minuses": "- " * 2_000 + "1",
    "sum": "1" + " + 1" * 1_000,
    "lists": "1 IN (" * 500 + "1" + ")" * 500,
    "logic": "(1 OR (1 AND " * 200 + "1" + "))" * 200,
}


@pytest.mark.parametrize("text", DEEP.values(), ids=DEEP)
def test_a_text_that_nests_too_deep_is_refused(text: str) -> None:
    assert len(text) <= MAX_LENGTH
    with pytest.raises(InvalidExpression, match=f"nest more than {MAX_DEPTH} deep"):
        compile_expression(text)


DEEPEST = {
    "parentheses": "{}1{}".format("(" * (MAX_DEPTH - 1), ")" * (MAX_DEPTH - 1)),
    "functions": "{}1{}".format("ABS(" * (MAX_DEPTH - 1), ")" * (MAX_DEPTH - 1)),
    "NOTs": "NOT " * (MAX_DEPTH - 2) + "1",
    "sum": "1" + " + 0" * (MAX_DEPTH - 1),
}


@pytest.mark.parametrize("text", DEEPEST.values(), ids=DEEPEST)
def test_the_deepest_text_is_compiled_and_evaluated(text: str) -> None:
    assert value(text) == 1


def test_one_parenthesis_more_is_refused() -> None:
    with pytest.raises(InvalidExpression, match=f"nest more than {MAX_DEPTH} deep"):
        compile_expression(f"({DEEPEST['parentheses']})")


def test_hundreds_of_terms_are_no_depth() -> None:
    assert value(" OR ".join(["/a = 1"] * 350), {"a": 2}) is False
    assert value(" AND ".join(["/a = 2"] * 350), {"a": 2}) is True
    assert value(f"/a IN ({', '.join(map(str, range(700)))})", {"a": 699}) is True


@pytest.mark.parametrize("sign", ["\0", "\ud800", "\x1b", "\u2028", "\N{RIGHT-TO-LEFT OVERRIDE}"])
def test_control_characters_and_half_characters_are_refused_or_plain_text(sign: str) -> None:
    with pytest.raises(InvalidExpression) as refused:
        compile_expression(f"/a = 1 {sign} )")
    assert "\0" not in str(refused.value)
    str(refused.value).encode()
    assert "\x1b" not in str(refused.value)
    assert "\N{RIGHT-TO-LEFT OVERRIDE}" not in str(refused.value).partition("\n")[2]


def test_half_a_character_in_a_string_is_refused_as_well() -> None:
    with pytest.raises(InvalidExpression, match=r"Column 7: this is half of a character"):
        compile_expression("/a = '\ud800'")


def test_a_nul_in_a_string_is_refused_as_well() -> None:
    with pytest.raises(InvalidExpression, match="Column 7: a NUL character is not accepted"):
        compile_expression("/a = '\0'")


BOMBS = [
    r"(a+)+$", r"((a*)*)*b", r"(a|a)+$", r"(.*)(.*)(.*)(.*)(.*)(.*)(.*)x", r"(x+x+)+y", r"(?:a|b)*a(?:a|b){200}c",
    r"(?:a?){500}a{500}c", r"[ab]*a[ab]{1000}c", r"^(([a-z])+.)+[A-Z]([a-z])+$", r"(?:(?:a{1,30}){1,30})$",
]  # fmt: skip


@pytest.mark.parametrize("bomb", BOMBS)
@pytest.mark.parametrize("text", ["a" * 50_000, "ab" * 25_000 + "!", "x" * 50_000], ids=["a", "ab", "x"])
def test_a_regular_expression_does_not_hang(bomb: str, text: str) -> None:
    try:
        value(f"/s LIKE r'{bomb}'", {"s": text})
    except InvalidExpression as refused:
        assert "RE2 does not accept this pattern" in refused.problem  # noqa: PT017


def test_the_patterns_of_an_expression_are_counted() -> None:
    part = " OR ".join(f"/s LIKE 'a+{n}'" for n in range(MAX_PATTERNS))
    assert value(part, {"s": "aa7"}) is True
    with pytest.raises(InvalidExpression, match=f"at most {MAX_PATTERNS} patterns") as refused:
        compile_expression(f"{part} OR /s LIKE 'one more'")
    assert refused.value.column == len(part) + len(" OR /s LIKE '")


def test_what_re2_states_of_a_pattern_stays_on_its_line() -> None:
    with pytest.raises(InvalidExpression) as refused:
        compile_expression("/s LIKE '[\n\x1b\\n" + "x" * 3_000 + "'")
    message, _, _ = str(refused.value).split("\n")
    assert message.isprintable()
    assert len(message) < 200


def test_a_search_that_could_take_seconds_is_null() -> None:
    text = "ab" * 500_000
    assert value("/s LIKE '(?:a|b)*a(?:a|b){900}c'", {"s": text}) is None
    assert value("/s LIKE 'b.*a$'", {"s": text}) is False
    assert value("/s LIKE 'abc'", {"s": text}) is False


def test_texts_do_not_multiply() -> None:
    body = {"a": "a" * 1_000, "list": [1] * 2_000, "sep": "x" * 2_000, "long": "x" * (MAX_TEXT - 2)}
    twice = f"CONCAT({', '.join(['/a'] * 25)})"
    assert value(twice, body) == "a" * 25_000
    assert value(f"CONCAT({', '.join([twice] * 30)})", body) == "a" * 750_000
    assert value(f"CONCAT({', '.join(['/long'] * 2)})", body) is None
    text = "'aa'"
    for _ in range(8):
        text = f"REPLACE({text}, 'a', '{'a' * 300}')"
    assert value(text) is None
    assert value("ARRAY_TO_STRING(/list, /sep)", body) is None
    assert value("ARRAY_TO_STRING(/list, '-')", body) == "-".join("1" * 2_000)
    assert value("REPLACE(/long, 'x', 'yz')", body) is None
    assert value("UPPER(/long) = 'X'", body) is False


@pytest.mark.parametrize(
    "number",
    [10**400, -(10**400), int("9" * 4_000), float("inf"), float("-inf"), float("nan")],
    ids=["huge", "-huge", "digits", "inf", "-inf", "nan"],
)
@pytest.mark.parametrize(
    "text",
    [
        "/n + 1",
        "/n * /n * /n",
        "/n / 3",
        "/n % 3",
        "3 % /n",
        "- /n",
        "/n > 5",
        "/n = '1'",
        "/n LIKE '9'",
        "CONCAT(/n)",
        "SUBSTR('abc', /n)",
        "ROUND(/n, /n)",
        "CEILING(/n)",
        "CHAR_VALUE(/n)",
        "/n IN (1, '2')",
        "/n BETWEEN 1 AND /n",
        "NOT /n",
        "IF(/n, 1, 2)",
    ],
)
def test_huge_numbers_do_no_harm(number: float, text: str) -> None:
    value(text, {"n": number})
    value(text, {"n": [number]})


def test_a_number_of_a_million_digits_in_a_string_is_read_at_once() -> None:
    assert value("/n > 5", {"n": "9" * 1_000_000}) is True
    assert value("/n + 1", {"n": "9" * 1_000_000}) == float("inf")
    assert value("/n + 0", {"n": "0." + "1" * 1_000_000}) == pytest.approx(1 / 9)


@pytest.mark.parametrize("sign", ["=", "!=", "<", ">=", "IN"])
def test_two_long_arrays_are_compared_in_the_time_of_reading_them(sign: str) -> None:
    size = 100_000
    body = {
        "a": [1] * size + list(range(size)),
        "b": [-5] * size,
        "c": ["x"] * size,
        "d": [f"{n}.0" for n in range(size)],
    }
    for character in "acd":
        for second_character in "bcd":
            value(
                f"/{character} IN (/{second_character})"
                if sign == "IN"
                else f"/{character} {sign} /{second_character}",
                body,
            )


def test_a_body_that_nests_deep_is_walked_without_recursion() -> None:
    body: Any = 7
    for _ in range(50_000):
        body = [body]
    try:
        assert value("/a", {"a": body}) == 7
        assert value("ARRAY_COUNT(/a)", {"a": body}) == 1
        assert value("/x", body) is None
    finally:  # freed one by one: freeing such a thing at once is what some versions of Python cannot
        while isinstance(body, list):
            body = body.pop()


def test_bodies_that_are_no_objects_have_no_fields() -> None:
    for body in (None, 5, 2.5, True, "text", b"\xff\x00", [], [[]], object()):
        assert value("/a = 1", body) is None
        assert value("/a/b = 1", body) is None
        assert value("/a/b/c[0] = 1", body) is None
