"""Arithmetic."""

from __future__ import annotations

from math import inf, isnan
from typing import Any

import pytest

from queueapp.expressions import InvalidExpression, compile_expression

from .evaluating import shown, value


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("1 / 5", 0), ("-7 / 2", -3), ("7 / -2", -3), ("8 / 2", 4), ("1.0 / 5", 0.2), ("1 / 5.0", 0.2), ("'1' / '5'", 0),  # noqa: E501
        ("2 + 3", 5), ("2 - 3", -1), ("2 * 3", 6), ("2 + 3.0", 5.0), ("2 * 3 + 4 * 5", 26), ("2 * (3 + 4)", 14),
        ("10 - 2 - 3", 5), ("100 / 10 / 5", 2), ("- 3 + 1", -2), ("- -3", 3), ("+ '4'", 4), ("2 * -3", -6), ("3 -1", 2),
    ],
)  # fmt: skip
def test_integers_stay_integers_and_a_double_makes_a_double(text: str, result: Any) -> None:
    assert shown(value(text)) == shown(result)


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("-5 % 3", -2),
        ("5 % -3", 2),
        ("5 % 3", 2),
        ("-5 MOD 3", -2),
        ("5 mod 3", 2),
        ("-5.5 % 3", -2.5),
        ("5.5 % -3", 2.5),
    ],
)
def test_the_remainder_keeps_the_sign_of_the_left_operand(text: str, result: Any) -> None:
    assert shown(value(text)) == shown(result)


@pytest.mark.parametrize("sign", ["+", "-", "*", "/", "%", "MOD"])
def test_null_gives_null_and_nan_wins(sign: str) -> None:
    assert value(f"1 {sign} NULL") is None
    assert value(f"'' {sign} 1") is None
    assert isnan(value(f"'abc' {sign} 1"))
    assert isnan(value(f"1 {sign} 'abc'"))
    assert isnan(value(f"'abc' {sign} NULL"))
    assert isnan(value(f"NULL {sign} NAN_VALUE()"))


@pytest.mark.parametrize("text", ["1 / 0", "1.0 / 0", "0 / 0", "1 / 0.0", "1 % 0", "1.5 % 0", "1e308 * 10 % 3"])
def test_dividing_by_zero_is_nan(text: str) -> None:
    assert isnan(value(text))


def test_an_overflow_is_a_double() -> None:
    assert shown(value("18446744073709551615 + 1")) == shown(2.0**64)
    assert shown(value("9223372036854775807 + 1")) == shown(2**63)
    assert value("1e308 * 10") == inf
    assert shown(value("/a * /a", {"a": 2**63})) == shown(2.0**126)


def test_a_slash_divides_only_with_a_space_behind_it() -> None:
    body = {"a": 6, "b": 3, "2": 4}
    assert value("/a / /b", body) == 2
    assert value("/a / 2", body) == 3
    with pytest.raises(
        InvalidExpression, match="Column 4: '/b' is not expected here; a slash that divides has a space"
    ):
        compile_expression("/a /b")
    with pytest.raises(InvalidExpression, match="Column 3"):
        compile_expression("6 /2")


def test_a_minus_without_spaces_belongs_to_the_name() -> None:
    assert value("/a-1", {"a-1": "x", "a": 5}) == "x"
    assert value("/a - 1", {"a-1": "x", "a": 5}) == 4


def test_arithmetic_takes_the_first_element_of_an_array() -> None:
    assert value("/list + 1", {"list": [10, 20]}) == 11
    assert value("- /list", {"list": [10, 20]}) == -10
    assert value("/list + 1", {"list": []}) is None
