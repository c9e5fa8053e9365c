"""AND, OR, NOT: the truth tables, what binds how, and what is not asked."""

from __future__ import annotations

import pytest

from queueapp.expressions import ParsedMessage, compile_expression

from .evaluating import value

TRUTHS = {"TRUE": True, "FALSE": False, "NULL": None}

SQL_92 = {
    "AND": {
        "TRUE TRUE": True, "TRUE FALSE": False, "TRUE NULL": None,
        "FALSE TRUE": False, "FALSE FALSE": False, "FALSE NULL": False,
        "NULL TRUE": None, "NULL FALSE": False, "NULL NULL": None,
    },
    "OR": {
        "TRUE TRUE": True, "TRUE FALSE": True, "TRUE NULL": True,
        "FALSE TRUE": True, "FALSE FALSE": False, "FALSE NULL": None,
        "NULL TRUE": True, "NULL FALSE": None, "NULL NULL": None,
    },
}  # fmt: skip

#: Where the documented tables of AMPS differ.
STRICT = {"AND": SQL_92["AND"] | {"NULL FALSE": None}, "OR": SQL_92["OR"] | {"NULL TRUE": None}}


def rows(tables: dict[str, dict[str, bool | None]]) -> list[tuple[str, str, str, bool | None]]:
    return [(word, *pair.split(), result) for word, table in tables.items() for pair, result in table.items()]  # type: ignore[misc]


@pytest.mark.parametrize(("word", "left", "right", "result"), rows(SQL_92))
def test_the_tables_of_sql_92(word: str, left: str, right: str, result: bool | None) -> None:
    body = {"a": TRUTHS[left], "b": TRUTHS[right]}
    assert value(f"{left} {word} {right}") is result
    assert value(f"/a {word} /b", body) is result
    assert value(f"/a = 1 {word} /b = 1", body) is result


@pytest.mark.parametrize(("word", "left", "right", "result"), rows(STRICT))
def test_the_tables_of_amps(word: str, left: str, right: str, result: bool | None) -> None:
    body = {"a": TRUTHS[left], "b": TRUTHS[right]}
    assert value(f"{left} {word} {right}", strict=True) is result
    assert value(f"/a {word} /b", body, strict=True) is result
    assert value(f"/a = 1 {word} /b = 1", body, strict=True) is result


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("text", "result"), [("NOT TRUE", False), ("NOT FALSE", True), ("NOT NULL", None), ("NOT NOT 5", True)]
)
def test_the_table_of_not(text: str, result: bool | None, strict: bool) -> None:
    assert value(text, strict=strict) is result


@pytest.mark.parametrize("word", ["AND", "OR"])
@pytest.mark.parametrize("strict", [False, True])
def test_a_chain_is_its_pairs_from_the_left(word: str, strict: bool) -> None:
    for a in TRUTHS:
        for b in TRUTHS:
            for c in TRUTHS:
                chain = value(f"{a} {word} {b} {word} {c}", strict=strict)
                assert chain is value(f"({a} {word} {b}) {word} {c}", strict=strict)


def test_a_missing_field_does_not_hide_a_match_unless_strict() -> None:
    text, message = "/a = 1 OR /b = 2", ParsedMessage({"b": 2})
    assert compile_expression(text).matches(message)
    assert not compile_expression(text, strict=True).matches(message)
    assert compile_expression("/b = 2 OR /a = 1", strict=True).matches(message)


@pytest.mark.parametrize(
    ("text", "grouped"),
    [
        ("TRUE OR FALSE AND FALSE", "TRUE OR (FALSE AND FALSE)"),
        ("NOT FALSE AND FALSE", "(NOT FALSE) AND FALSE"),
        ("NOT FALSE OR TRUE", "(NOT FALSE) OR TRUE"),
        ("NOT 1 = 2", "NOT (1 = 2)"),
        ("NOT 1 + 1 = 3", "NOT ((1 + 1) = 3)"),
        ("1 + 2 * 3 = 7 AND 1 < 2", "((1 + (2 * 3)) = 7) AND (1 < 2)"),
        ("- 2 * 3 = -6", "((- 2) * 3) = -6"),
        ("7 - 2 - 1 = 4", "((7 - 2) - 1) = 4"),
    ],
)
def test_not_binds_more_than_and_and_and_more_than_or(text: str, grouped: str) -> None:
    assert value(text) is value(grouped) is not None


@pytest.mark.parametrize(
    "text", ["/a = 1 and /b is not null or not /c in (2)", "/a = 1 AND /b IS NOT NULL OR NOT /c IN (2)"]
)
def test_words_are_written_in_any_case(text: str) -> None:
    assert value(text, {"a": 1, "b": 1, "c": 2}) is True


class Sentry(dict):  # type: ignore[type-arg]
    """Says that it was looked at."""

    def get(self, key: str, default: object = None) -> object:
        if key == "trap":
            raise AssertionError("it was asked")
        return super().get(key, default)


@pytest.mark.parametrize(
    "text", ["/a = 1 OR /trap = 1", "/a = 2 AND /trap = 1", "IF(/a = 1, 2, /trap)", "COALESCE(/a, /trap)"]
)
@pytest.mark.parametrize("strict", [False, True])
def test_what_cannot_change_the_answer_is_not_asked(text: str, strict: bool) -> None:
    value(text, Sentry(a=1), strict=strict)
    with pytest.raises(AssertionError):
        value("/trap", Sentry())
