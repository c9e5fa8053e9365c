"""Properties, of expressions and bodies that Hypothesis makes up."""

from __future__ import annotations

from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from queueapp.expressions import InvalidExpression, ParsedMessage, compile_expression

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["", "1", "2.0", "x"]),
    lambda inside: st.lists(inside, max_size=4) | st.dictionaries(st.sampled_from("abc"), inside, max_size=3),
    max_leaves=12,
)

BODIES = st.dictionaries(st.sampled_from("abc"), JSON, max_size=3) | JSON

OPERANDS = st.sampled_from(
    [
        "/a",
        "/b",
        "/a/b",
        "/a/b/c",
        "/a[0]",
        "/c[1]/a",
        "1",
        "2.5",
        "'x'",
        "'2'",
        "''",
        "NULL",
        "TRUE",
        "FALSE",
        "NAN_VALUE()",
    ]
)

#: Operands with operators around them, always in parentheses.
EXPRESSIONS = st.recursive(
    OPERANDS,
    lambda inside: st.one_of(
        st.builds(
            "({} {} {})".format,
            inside,
            st.sampled_from(["+", "-", "*", "/", "%", "=", "!=", "<", ">=", "AND", "OR"]),
            inside,
        ),
        st.builds("(NOT {})".format, inside),
        st.builds("(- {})".format, inside),
        st.builds("({} IN ({}, {}))".format, inside, inside, inside),
        st.builds("({} BETWEEN {} AND {})".format, inside, inside, inside),
        st.builds("({} LIKE 'x|[0-9]')".format, inside),
        st.builds("({} IS {})".format, inside, st.sampled_from(["NULL", "NOT NULL", "NAN"])),
        st.builds("({} BEGINS WITH ({}))".format, inside, inside),
        st.builds(
            "{}({})".format,
            st.sampled_from(["ABS", "UPPER", "REVERSE", "CRC32", "ROUND", "CONCAT", "ARRAY_COUNT"]),
            inside,
        ),
        st.builds("IF({}, {}, {})".format, inside, inside, inside),
        st.builds("COALESCE({}, {})".format, inside, inside),
        st.builds("SUBSTR({}, {})".format, inside, inside),
    ),
    max_leaves=8,
)


@given(EXPRESSIONS, BODIES, st.booleans())
def test_an_evaluation_never_raises_and_gives_a_value_of_the_language(text: str, body: Any, strict: bool) -> None:
    expression, message = compile_expression(text, strict=strict), ParsedMessage(body)
    value = expression.evaluate(message)
    assert value is None or type(value) in (bool, int, float, str)
    assert value != ""
    assert type(value) is not int or -(2**63) <= value < 2**64
    assert expression.matches(message) in (True, False)


@given(EXPRESSIONS, BODIES)
def test_not_turns_true_and_false_and_leaves_null(text: str, body: Any) -> None:
    message = ParsedMessage(body)
    once, twice = (compile_expression(item).evaluate(message) for item in (f"NOT {text}", f"NOT NOT {text}"))
    assert (once is None) is (twice is None)
    assert once is None or twice is (not once)
    assert compile_expression(text).matches(message) is (twice is True)


@given(EXPRESSIONS, EXPRESSIONS, BODIES)
def test_in_sql_92_and_and_or_do_not_care_which_is_first(first: str, second: str, body: Any) -> None:
    message = ParsedMessage(body)
    for word in ("AND", "OR"):
        results = {
            str(compile_expression(f"{a} {word} {b}").evaluate(message)) for a, b in ((first, second), (second, first))
        }
        assert len(results) == 1


@given(EXPRESSIONS, EXPRESSIONS, BODIES)
def test_what_matches_strictly_matches(first: str, second: str, body: Any) -> None:
    message, text = ParsedMessage(body), f"({first} = 1 AND {second} = 1) OR {first} = 2"
    assert not compile_expression(text, strict=True).matches(message) or compile_expression(text).matches(message)


@given(st.text(max_size=60) | st.text("/ab'\"\\()[],=<>!+-*%.0123456789 \nNOTANDORINLIKEISrx", max_size=60))
@example("/a = 1 OR")
@example("r'")
@example("[/a][")
def test_any_text_compiles_or_is_refused_with_a_column_in_it(text: str) -> None:
    try:
        compile_expression(text).evaluate(ParsedMessage({"a": 1}))
        return
    except InvalidExpression as error:
        refused = error
    assert 1 <= refused.column <= len(text) + 1
    message, line, caret = str(refused).split("\n")
    assert message.startswith(f"Column {refused.column}: ")
    if refused.column <= len(text) and text[refused.column - 1].isprintable():
        assert line[len(caret) - 1] == text[refused.column - 1]


@given(st.text())
def test_every_text_can_be_written_as_a_literal(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        return
    quoted = "".join(f"\\x{ord(sign):02x}" if sign == "\0" else f"\\{sign}" if sign in "'\\" else sign for sign in text)
    if len(quoted) < 4000:
        assert compile_expression(f"'{quoted}'").evaluate(ParsedMessage()) == (text or None)
