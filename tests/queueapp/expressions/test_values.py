"""Types and literals."""

from __future__ import annotations

from math import isnan
from typing import Any

import pytest

from .evaluating import matches, shown, value


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("42", 42),
        ("3.14", 3.14),
        ("6.02E23", 6.02e23),
        (".5", 0.5),
        ("5.", 5.0),
        ("1e-3", 0.001),
        ("9223372036854775807", 2**63 - 1),
        ("18446744073709551615", 2**64 - 1),
        ("-9223372036854775808", -(2**63)),
        ("18446744073709551616", 2.0**64),
        ("-9223372036854775809", -(2.0**63)),
        ("TRUE", True),
        ("false", False),
        ("NULL", None),
        ("'it'", "it"),
        ('"it"', "it"),
        (r"'a\a\b\t\n\f\r'", "a\a\b\t\n\f\r"),
        (r"'\x41\x4a\x7'", "AJ\x07"),
        (r"'\101\7'", "A\x07"),
        (r"'\501'", "A"),
        (r"'\'\"\\\q\/'", "'\"\\q/"),
        (r"'\xc3\xa9'", "é"),
        ("'größe \N{SNOWMAN}'", "größe ☃"),
        (r"r'\d\n'", r"\d\n"),
        (r'R"\d"', r"\d"),
        ("'two\nlines'", "two\nlines"),
    ],
)
def test_a_literal_is_its_value(text: str, meant: Any) -> None:
    assert shown(value(text)) == shown(meant)


@pytest.mark.parametrize("text", ["''", '""', "r''"])
def test_the_empty_string_is_null(text: str) -> None:
    assert value(text) is None
    assert value(f"{text} IS NULL") is True
    assert value("/a IS NULL", {"a": ""}) is True
    assert value(f"{text} = {text}") is None


@pytest.mark.parametrize("body", [{"a": None}, {"a": ""}, {}, {"a": []}, {"a": {}}])
def test_null_is_missing_and_empty_alike(body: Any) -> None:
    assert value("/a", body) is None


@pytest.mark.parametrize(
    ("number", "kept"),
    [
        (2**64 - 1, 2**64 - 1),
        (2**64, 2.0**64),
        (-(2**63) - 1, -(2.0**63)),
        (10**400, float("inf")),
        (-(10**400), float("-inf")),
    ],
)
def test_an_integer_of_more_than_64_bits_is_a_double(number: int, kept: Any) -> None:
    assert shown(value("/a", {"a": number})) == shown(kept)
    assert shown(value("/a/b", {"a": {"b": number}})) == shown(kept)


def test_a_boolean_is_1_or_0() -> None:
    assert value("/a + 1", {"a": True}) == 2
    assert value("/a = 1", {"a": True}) is True
    assert value("CONCAT(/a, /b)", {"a": True, "b": False}) == "10"
    assert value("STREQUAL_I('a', 'A') == 1") is True


@pytest.mark.parametrize(
    ("text", "number"), [("12", 12), ("-1.5", -1.5), ("+2e2", 200.0), (".5", 0.5), ("9" * 30, 1e30)]
)
def test_a_string_converts_to_its_number(text: str, number: Any) -> None:
    assert shown(value("/a + 0", {"a": text})) == shown(number)


@pytest.mark.parametrize(
    "text", ["abc", "12x", " 12", "1 2", "1_0", "nan", "inf", "0x10", "1e", ".", "\u0661", "\u00b2"]
)
def test_a_string_that_is_not_a_number_is_nan_in_a_numeric_context(text: str) -> None:
    assert isnan(value("/a + 0", {"a": text}))
    assert value("/a IS NAN", {"a": text}) is True


def test_a_number_converts_to_a_string() -> None:
    assert value("CONCAT(5, '/', 2.5)") == "5/2.5"
    assert value("/a LIKE '^12'", {"a": 1234}) is True
    assert value("/a BEGINS WITH ('12')", {"a": 1234}) is True


@pytest.mark.parametrize(
    ("text", "is_match"),
    [
        ("1", True),
        ("0", False),
        ("-0.5", True),
        ("'1'", True),
        ("'0'", False),
        ("TRUE", True),
        ("FALSE", False),
        ("NULL", False),
        ("'abc'", False),
        ("NAN_VALUE()", False),
    ],
)
def test_a_value_matches_when_it_is_true(text: str, is_match: bool) -> None:
    assert matches(text) is is_match
    assert matches(f"{text} AND TRUE") is is_match


def test_what_is_not_a_number_is_neither_true_nor_false() -> None:
    assert value("NOT 'abc'") is None
    assert value("NOT NAN_VALUE()") is None
    assert value("'abc' AND FALSE") is False
