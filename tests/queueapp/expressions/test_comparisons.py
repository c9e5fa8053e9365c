"""Comparisons, BETWEEN, IN, IS."""

from __future__ import annotations

from typing import Any

import pytest

from .evaluating import matches, value

COMPARISONS = ["=", "==", "!=", "<>", "<", "<=", ">", ">="]


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("10 < 'Crank'", True),
        ("10 < '2'", False),
        ("10 > '2'", True),
        ("'2.000' <> '2.0'", True),
        ("2 = 2.0", True),
        ("'2.0' = 2", True),
        ("2 = '2.0'", True),
        ("'abc' > 1e300", True),
        ("'abc' <= 5", False),
        ("5 >= 'abc'", False),
        ("5 = 'abc'", False),
        ("5 != 'abc'", True),
        ("'10' < '9'", True),
        ("'a' = 'A'", False),
        ("'B' < 'a'", True),
        ("'é' > 'z'", True),
        ("TRUE = 1", True),
        ("TRUE = '1'", True),
        ("TRUE > FALSE", True),
        ("18446744073709551615 > 9223372036854775807", True),
        ("'99999999999999999999999' > 1", True),
        ("9223372036854775807 = '9223372036854775807'", True),
        ("'abc' > NAN_VALUE()", False),
        ("NAN_VALUE() < 'abc'", False),
        ("'abc' != NAN_VALUE()", True),
    ],
)
def test_mixed_types_compare_as_numbers_if_the_string_is_one_and_else_it_is_greater(text: str, result: bool) -> None:
    assert value(text) is result


def test_a_text_that_is_no_number_has_no_order_with_nan() -> None:
    body = {"text": "abc", "nan": float("nan")}
    assert [value(f"/text {sign} /nan", body) for sign in ("<", ">", "<=", ">=", "=")] == [False] * 5
    assert [value(f"/nan {sign} /text", body) for sign in ("<", ">", "<=", ">=", "=")] == [False] * 5
    assert value("/text != /nan", body) is True


@pytest.mark.parametrize("sign", COMPARISONS)
@pytest.mark.parametrize("second", ["1", "'x'", "NULL", "''", "/missing", "TRUE"])
def test_a_comparison_with_null_is_never_true(sign: str, second: str) -> None:
    for text in (
        f"/nothing {sign} {second}",
        f"{second} {sign} /nothing",
        f"{second} {sign} NULL",
        f"'' {sign} {second}",
    ):
        assert value(text, {}) is None
        assert value(f"NOT ({text})", {}) is None
        assert not matches(text, {})


@pytest.mark.parametrize("sign", COMPARISONS)
@pytest.mark.parametrize("second", ["1", "'x'", "'1'", "NAN_VALUE()"])
def test_nan_differs_from_everything_and_has_no_order(sign: str, second: str) -> None:
    assert value(f"NAN_VALUE() {sign} {second}") is (sign in ("!=", "<>"))
    assert value(f"{second} {sign} NAN_VALUE()") is (sign in ("!=", "<>"))


@pytest.mark.parametrize(("first", "second"), [("=", "=="), ("!=", "<>")])
def test_equality_and_inequality_have_two_spellings(first: str, second: str) -> None:
    for pair in ("1 {} 1", "1 {} 2", "'a' {} 'a'"):
        assert value(pair.format(first)) is value(pair.format(second))


@pytest.mark.parametrize("sign", COMPARISONS)
def test_a_literal_may_stand_on_either_side(sign: str) -> None:
    for field in (1, 2, 3, "1", "2", "x", 2.5, True, [1, 3], [], None):
        for literal in (2, "'2'", "'x'", "2.5"):
            body = {"a": field, "b": 2 if literal == 2 else 2.5 if literal == "2.5" else str(literal).strip("'")}
            assert value(f"/a {sign} {literal}", body) is value(f"/a {sign} /b", body)
            assert value(f"{literal} {sign} /a", body) is value(f"/b {sign} /a", body)


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("5 BETWEEN 5 AND 7", True),
        ("7 BETWEEN 5 AND 7", True),
        ("8 BETWEEN 5 AND 7", False),
        ("'6' BETWEEN 5 AND 7", True),
        ("'b' BETWEEN 'a' AND 'c'", True),
        ("5 NOT BETWEEN 6 AND 7", True),
        ("5 BETWEEN 6 AND NULL", False),
        ("5 BETWEEN 4 AND NULL", None),
        ("NULL BETWEEN 1 AND 2", None),
        ("NULL NOT BETWEEN 1 AND 2", None),
        ("3 + 3 BETWEEN 2 * 2 AND 10 - 2 AND TRUE", True),
    ],
)
def test_between_is_inclusive(text: str, result: bool | None) -> None:
    assert value(text) is result


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("/a IN (1, 2, 3)", True),
        ("/a IN ('2')", True),
        ("/a IN ('x', 2.0)", True),
        ("/a IN (1, 3)", False),
        ("/a IN (/b, 1 + 1)", True),
        ("/s IN ('x', 'y')", True),
        ("/s IN ('X', 'Y')", False),
        ("'2' IN (2)", True),
        ("'2' IN ('2.0')", False),
        ("/a IN (1, NULL)", None),
        ("/a IN (2, NULL)", True),
        ("/missing IN (1, 2)", None),
        ("NAN_VALUE() IN (1, NAN_VALUE())", False),
    ],
)
def test_in_is_the_equal_comparisons_joined_by_or(text: str, result: bool | None) -> None:
    body = {"a": 2, "b": 7, "s": "x"}
    assert value(text, body) is result
    value_of, _, items = text.partition(" IN ")
    assert value(" OR ".join(f"{value_of} = {item}" for item in items[1:-1].split(", ")), body) is result


@pytest.mark.parametrize("text", ["/a IN (1, 2)", "/a IN (2)", "/missing IN (1)", "/a IN (2, NULL)", "/list IN (3)"])
def test_not_in_is_not_of_in(text: str) -> None:
    body = {"a": 1, "list": [3, 4]}
    assert value(text.replace(" IN ", " NOT IN "), body) is value(f"NOT ({text})", body)


@pytest.mark.parametrize(
    ("field", "null", "nan"),
    [
        (None, True, False),
        ("", True, False),
        ("x", False, True),
        (5, False, False),
        ("5", False, False),
        (False, False, False),
    ],
)
def test_is_null_and_is_nan(field: Any, null: bool, nan: bool) -> None:
    body = {"a": field}
    assert value("/a IS NULL", body) is null
    assert value("/a IS NOT NULL", body) is not null
    assert value("/a IS NAN", body) is nan
    assert value("/a IS NOT NAN", body) is not nan


def test_comparisons_do_not_chain() -> None:
    assert value("(1 < 2) = 1") is True
    with pytest.raises(ValueError, match="Column 7"):
        value("1 < 2 < 3")
