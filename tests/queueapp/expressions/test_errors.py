"""What is said of a text that is no expression."""

from __future__ import annotations

import pytest

from queueapp import QueueError
from queueapp.expressions import InvalidExpression, compile_expression
from queueapp.expressions.parser import MAX_LENGTH


def refusal(text: str) -> InvalidExpression:
    with pytest.raises(InvalidExpression) as refused:
        compile_expression(text)
    return refused.value


@pytest.mark.parametrize(
    ("text", "column", "problem"),
    [
        ("", 1, "the expression is empty"),
        ("  \n ", 1, "the expression is empty"),
        ("/a = ", 6, "something is missing at the end"),
        ("(/a = 1", 8, "something is missing at the end"),
        ("/a = )", 6, "')' is not expected here"),
        ("/a = 1)", 7, "')' is not expected here"),
        ("/a = 'open", 6, "this string is not closed"),
        ('/a = "open', 6, "this string is not closed"),
        ("/a = 1 ; DROP", 8, "';' means nothing here"),
        ("/a & 1", 4, "'&' means nothing here"),
        ("price > 3", 7, "'>' is not expected here; a field is written /name, and a text 'name'"),
        ("/a = gold", 10, "something is missing at the end"),
        ("/a IN ()", 8, "')' is not expected here"),
        ("/a IN 1", 7, "'1' is not expected here"),
        ("/a NOT 5", 8, "'5' is not expected here"),
        ("1 2", 3, "'2' is not expected here"),
        ("1e999", 1, "this number is too large for a double"),
        ("9" * 400, 1, "this number is too large for a double"),
        ("/a = '\\xff'", 6, "the escapes of this string are not UTF-8"),
        ("AND", 1, "'AND' is not expected here"),
        ("/a LIKE 'x' = AND", 13, "'=' is not expected here"),
    ],
)
def test_an_error_points_at_its_column(text: str, column: int, problem: str) -> None:
    error = refusal(text)
    assert (error.text, error.column, error.problem) == (text, column, problem)
    assert str(error).startswith(f"Column {column}: {problem}.\n")


def test_an_error_shows_the_text_with_a_caret_under_the_column() -> None:
    assert str(refusal("/price > ) AND /qty")) == (
        "Column 10: ')' is not expected here.\n"
        "    /price > ) AND /qty\n"
        "             ^"
    )  # fmt: skip


def test_of_a_long_text_the_surroundings_are_shown() -> None:
    _, line, caret = str(refusal("/a = 1 OR " * 100 + ") " + "OR /b = 1 " * 100)).split("\n")
    assert line[caret.index("^")] == ")"
    assert line.strip().startswith("…")
    assert line.endswith("…")
    assert len(line) < 140


def test_a_line_break_or_a_tab_does_not_move_the_caret() -> None:
    _, line, caret = str(refusal("/a = 1\n\tAND )")).split("\n")
    assert line == "    /a = 1  AND )"
    assert line[caret.index("^")] == ")"


def test_it_is_a_queue_error_and_a_value_error() -> None:
    assert isinstance(refusal(")"), QueueError)
    assert isinstance(refusal(")"), ValueError)


@pytest.mark.parametrize("text", [None, 5, b"/a = 1", ["/a"]])
def test_what_is_no_text_is_a_type_error(text: object) -> None:
    with pytest.raises(TypeError, match="an expression is a str"):
        compile_expression(text)  # type: ignore[arg-type]


def test_the_longest_text_is_accepted_and_one_character_more_is_not() -> None:
    longest = "/a = 1".ljust(MAX_LENGTH)
    assert compile_expression(longest).text == longest
    assert refusal(longest + " ").column == MAX_LENGTH + 1
