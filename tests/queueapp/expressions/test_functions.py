"""The functions."""

from __future__ import annotations

from math import isnan
from typing import Any

import pytest

from queueapp.expressions import InvalidExpression, compile_expression
from queueapp.expressions.functions import FUNCTIONS, SPECIAL

from .evaluating import shown, value

BODY = {"s": "Fandango", "n": -7, "f": 2.5, "list": ["b", "a"], "empty": "", "u": "Größe"}

EXAMPLES: list[tuple[str, Any]] = [
    ("ABS(/n)", 7),
    ("ABS('-1.5')", 1.5),
    ("ARRAY_COUNT(/list)", 2),
    ("ARRAY_TO_STRING(/list, ', ')", "b, a"),
    ("CEILING(/f)", 3),
    ("CEILING(-2.5)", -2),
    ("CHAR_VALUE(65)", "A"),
    ("CHAR_VALUE(0)", None),
    ("CHAR_VALUE(55296)", None),
    ("CHAR_VALUE('x')", None),
    ("COALESCE(/missing, /empty, /n, 1)", -7),
    ("COALESCE(NULL, NULL)", None),
    ("CONCAT('a', /empty, 1, TRUE, 'b')", "a11b"),
    ("CONCAT(NULL)", None),
    ("CRC32('123456789')", 0xCBF43926),
    ("FALSE_VALUE()", False),
    ("FLOOR(/f)", 2),
    ("FLOOR(-2.5)", -3),
    ("IF(/n < 0, 'below', 'above')", "below"),
    ("IF(/missing, 1, 2)", 2),
    ("INSTR(/s, 'dan')", 4),
    ("INSTR(/s, 'DAN')", 0),
    ("INSTR(/s, 'F')", 1),
    ("INSTR_I(/s, 'DAN')", 4),
    ("INSTR(12345, 34)", 3),
    ("LOWER(/s)", "fandango"),
    ("LOWER('GRÖSSE')", "grÖsse"),
    ("MESSAGE_SIZE()", 120),
    ("REPLACE(/s, 'an', 'o')", "Fodogo"),
    ("REPLACE(/s, 'an', '')", "Fdgo"),
    ("REPLACE(/s, '', 'x')", None),
    ("REPLACE('a', 'a', '')", None),
    ("REVERSE(SUBSTR('fandango',5))", "ogna"),
    ("ROUND(2.5)", 3),
    ("ROUND(-2.5)", -3),
    ("ROUND(2.4)", 2),
    ("ROUND(1.5, 1000000)", 1.5),
    ("ROUND(1.5, -1000000)", 0),
    ("ROUND(2.345, 2)", 2.35),
    ("ROUND(1.005, 2)", 1.01),
    ("ROUND(-0.05, 1)", -0.1),
    ("ROUND(1250, -2)", 1300),
    ("ROUND(1e300, -299)", 10.0**300),
    ("ROUND(5, -999)", 0),
    ("ROUND(2.5, 99)", 2.5),
    ("ROUND(2.5, 'x')", None),
    ("ROUND(1234.5, -2)", 1200),
    ("ROUND(7)", 7),
    ("ROUND(7, 2)", 7),
    ("STREQUAL_I(/s, 'FANDANGO')", True),
    ("STREQUAL_I(/s, 'x')", False),
    ("SUBSTR(/s, 1)", "Fandango"),
    ("SUBSTR(/s, 0)", "Fandango"),
    ("SUBSTR(/s, 2, 3)", "and"),
    ("SUBSTR(/s, -3)", "ngo"),
    ("SUBSTR(/s, -3, 2)", "ng"),
    ("SUBSTR(/s, -99, 2)", "Fa"),
    ("SUBSTR(/s, 99)", None),
    ("SUBSTR(/s, 1, 0)", None),
    ("SUBSTR(/s, 1, -2)", None),
    ("SUBSTR(/s, 'x')", None),
    ("SUBSTR(/u, 3, 2)", "öß"),
    ("TOPIC_NAME()", "orders"),
    ("TRUE_VALUE()", True),
    ("UPPER(/s)", "FANDANGO"),
    ("UPPER(/u)", "GRößE"),
    ("if(true, upper('a'), 'b')", "A"),
]


@pytest.mark.parametrize(("text", "result"), EXAMPLES, ids=[text for text, _ in EXAMPLES])
def test_a_function_gives(text: str, result: Any) -> None:
    assert shown(value(text, BODY, topic="orders", size=120)) == shown(result)


def test_every_function_has_an_example() -> None:
    called = {text.partition("(")[0].upper() for text, _ in EXAMPLES}
    assert {*FUNCTIONS, *SPECIAL} - called == {"NAN_VALUE"}
    assert isnan(value("NAN_VALUE()"))


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_null_gives_null(name: str) -> None:
    function = FUNCTIONS[name]
    for arguments in range(function.min_args or 9, (function.max_args or 2) + 1):
        if name != "CONCAT":
            assert value(f"{name}({', '.join(['NULL'] * arguments)})") is None


def test_columns_that_are_not_known_are_null() -> None:
    assert value("TOPIC_NAME() IS NULL AND MESSAGE_SIZE() IS NULL") is True


@pytest.mark.parametrize("name", ["ABS", "CEILING", "FLOOR", "ROUND"])
def test_numeric_functions_of_what_is_not_a_number_are_nan(name: str) -> None:
    assert isnan(value(f"{name}('abc')"))
    assert isnan(value(f"{name}(NAN_VALUE())"))
    assert value(f"{name}(1e308 * 10)") == float("inf")


@pytest.mark.parametrize(
    ("text", "column", "problem"),
    [
        ("1 + FOO(1)", 5, "there is no function FOO; there are ABS, ARRAY_COUNT"),
        ("UNIX_TIMESTAMP() > 5", 1, "UNIX_TIMESTAMP depends on more than the message"),
        ("IF(1)", 1, "IF takes 3 arguments, not 1"),
        ("SUBSTR('a')", 1, "SUBSTR takes 2 to 3 arguments, not 1"),
        ("CONCAT()", 1, "CONCAT takes 1 or more arguments, not 0"),
        ("TOPIC_NAME(1)", 1, "TOPIC_NAME takes 0 arguments, not 1"),
    ],
)
def test_a_wrong_call_is_refused_when_it_is_compiled(text: str, column: int, problem: str) -> None:
    with pytest.raises(InvalidExpression) as refused:
        compile_expression(text)
    assert refused.value.column == column
    assert problem in refused.value.problem
