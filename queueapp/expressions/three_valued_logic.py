"""AND, OR and NOT of three values. Terms are asked from the left, and no more of them than it takes.

SQL-92: NULL is "unknown", and an answer is NULL only where it would depend on what is unknown. The tables that AMPS
documents differ where the left operand is NULL: then the answer is, whatever stands on the right.

| AND | TRUE | FALSE | NULL | | OR | TRUE | FALSE | NULL |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
| TRUE | TRUE | FALSE | NULL | | TRUE | TRUE | TRUE | TRUE |
| FALSE | FALSE | FALSE | FALSE | | FALSE | TRUE | FALSE | NULL |
| NULL | NULL | FALSE (AMPS: NULL) | NULL | | NULL | TRUE (AMPS: NULL) | NULL | NULL |
"""

from __future__ import annotations

from typing import Any

from .paths import Read

Terms = tuple[Read, ...]


def conjunction(terms: Terms) -> Read:
    def every(message: Any) -> bool | None:
        unknown = False
        for term in terms:
            answer = term(message)
            if not answer:
                if answer is not None:
                    return False
                unknown = True
        return None if unknown else True

    return every


def disjunction(terms: Terms) -> Read:
    def some(message: Any) -> bool | None:
        unknown = False
        for term in terms:
            answer = term(message)
            if answer:
                return True
            if answer is None:
                unknown = True
        return None if unknown else False

    return some


def strict_conjunction(terms: Terms) -> Read:
    def every(message: Any) -> bool | None:
        for term in terms:
            answer = term(message)
            if not answer:
                return answer  # type: ignore[no-any-return]
        return True

    return every


def strict_disjunction(terms: Terms) -> Read:
    def some(message: Any) -> bool | None:
        for term in terms:
            answer = term(message)
            if answer is not False:
                return answer  # type: ignore[no-any-return]
        return False

    return some


def negation(term: Read) -> Read:
    def negated(message: Any) -> bool | None:
        answer = term(message)
        return None if answer is None else not answer

    return negated
