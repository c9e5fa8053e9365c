"""Arrays: what looks at every element, and what takes the first."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from queueapp.expressions.coercion import COMPARISONS, any_of, compared, scalars, settled

from .evaluating import value

#: The examples of the manual.
BODY = {"data": [1, 2, 3, "zebra", 5], "other": [14, 34, 23, 5], "none": [], "holes": [None, "", 4]}


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("/data = 1", True), ("/data = 'zebra'", True), ("/data != 'zebra'", True), ("/data = 42", False),
        ("/data LIKE 'z'", True), ("/other > 30", True), ("/other > 50", False), ("30 < /other", True),
        ("/data[0] = 1", True), ("/data[3] = \"zebra\"", True), ("/data[1] != 1", True), ("/other[1] LIKE '4'", True),
        ("/data = /other", True), ("/data IN (/other)", True), ("/data IN (5, 6, 7)", True), ("/data IN (6, 7)", False),
        ("/data BEGINS WITH ('ze')", True), ("/data ENDS WITH ('x', 'bra')", True), ("/other ENDS WITH ('x')", False),
        ("/other BETWEEN 20 AND 30", True), ("/other BETWEEN 24 AND 30", False), ("/holes = 4", True),
    ],
)  # fmt: skip
def test_a_comparison_is_true_when_any_element_satisfies_it(text: str, result: bool) -> None:
    assert value(text, BODY) is result


def test_unequal_is_true_when_any_element_differs() -> None:
    assert value("/a != 1", {"a": [1, 2]}) is True
    assert value("/a != 1", {"a": [1, 1.0, "1"]}) is False


def test_an_element_that_is_null_leaves_the_answer_open() -> None:
    assert value("/holes = 5", BODY) is None
    assert value("NOT /holes = 5", BODY) is None


@pytest.mark.parametrize(
    "text",
    [
        "/none = 1",
        "/none != 1",
        "/none LIKE 'x'",
        "/none IN (1)",
        "/none BETWEEN 1 AND 2",
        "/none + 1",
        "UPPER(/none)",
        "/none BEGINS WITH ('x')",
    ],
)
def test_an_empty_array_is_null(text: str) -> None:
    assert value("/none IS NULL", BODY) is True
    assert value(text, BODY) is None


def test_arithmetic_functions_and_other_operators_take_the_first_element() -> None:
    assert value("/other + 1", BODY) == 15
    assert value("ABS(/other)", BODY) == 14
    assert value("CONCAT(/data, /other)", BODY) == "114"
    assert value("/other", BODY) == 14
    assert value("/holes IS NULL", BODY) is True
    assert value("IF(/other = 5, /data, 0)", BODY) == 1
    assert value("NOT /data", BODY) is False


def test_array_count_and_array_to_string_see_all_elements() -> None:
    assert value("ARRAY_COUNT(/data)", BODY) == 5
    assert value("ARRAY_COUNT(/none)", BODY) == 0
    assert value("ARRAY_COUNT(/missing)", BODY) == 0
    assert value("ARRAY_COUNT(7)", BODY) == 1
    assert value("ARRAY_TO_STRING(/data, '-')", BODY) == "1-2-3-zebra-5"
    assert value("ARRAY_TO_STRING(/holes, '-')", BODY) == "4"
    assert value("ARRAY_TO_STRING(/data, '')", BODY) == "123zebra5"
    assert value("ARRAY_TO_STRING(/none, '-')", BODY) is None


@pytest.mark.parametrize(
    ("left", "sign", "right", "result"),
    [
        ([7], "=", ["x", "7.0"], True),
        (["x", "7.0"], "=", [7], True),
        (["7"], "=", ["7.0"], False),
        ([9], "<", ["10"], True),
        (["9"], "<", ["10"], False),
        (["9"], "<", [10], True),
        (["10", "9"], ">", [9.5], True),
        ([9.5], "<", ["9", "10"], True),
        ([5], "<", ["4", "x"], True),
        (["x", "4"], ">", [5], True),
        ([5], "<", ["#", "4"], True),
        (["#", "4"], ">", [5], True),
        (["x"], "<", [5], False),
        ([2, "2"], "!=", ["2"], False),
        (["2", "2.0"], "!=", [2], False),
        (["2", "2.0"], "!=", ["2"], True),
        ([float("nan")], "!=", [1], True),
        ([float("nan")], "<", ["x"], False),
        ([None, 1], "=", [2], None),
        ([None, 1], "=", [1], True),
        ([1], "<", [None], None),
    ],
)
def test_every_pair_of_two_arrays_counts(left: list[Any], sign: str, right: list[Any], result: bool | None) -> None:
    assert value(f"/a {sign} /b", {"a": left, "b": right}) is result


ELEMENTS = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.sampled_from([0.5, 2.0, float("nan"), float("inf")]),
    st.sampled_from(["", "1", "2", "2.0", "10", "9", "x", "zebra", "-1", "0x"]),
)  # fmt: skip


@given(st.lists(ELEMENTS, max_size=6), st.lists(ELEMENTS, max_size=6), st.sampled_from(sorted(COMPARISONS)))
def test_two_arrays_compare_as_all_pairs_of_their_elements(left: list[Any], right: list[Any], sign: str) -> None:
    first, second = [settled(item) for item in left], [settled(item) for item in right]
    every = any_of(scalars(COMPARISONS[sign], a, b) for a, b in product(first, second)) if first and second else None
    if first and second:
        assert compared(COMPARISONS[sign], first, second) is every
    assert value(f"/a {sign} /b", {"a": left, "b": right}) is every


@given(st.lists(ELEMENTS, max_size=5), st.lists(ELEMENTS, min_size=1, max_size=5))
def test_in_of_arrays_is_the_equal_comparisons_joined_by_or(left: list[Any], right: list[Any]) -> None:
    body = {"a": left} | {f"i{n}": item for n, item in enumerate(right)}
    items = [f"/i{n}" for n in range(len(right))]
    joined = value(" OR ".join(f"/a = {item}" for item in items), body)
    assert value(f"/a IN ({', '.join(items)})", body) is joined
