"""From the tree to closures. Every decision that does not depend on the message is made here, once.

A closure per node, each calling those of its operands: no ``eval``, no bytecode. What most filters consist of, a field
compared with a literal, has closures of its own, which know the type of the literal.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from itertools import chain
from typing import Any

import re2

from ..errors import InvalidExpression
from .coercion import (
    ARITHMETIC,
    COMPARISONS,
    MIRRORED,
    Compare,
    Known,
    any_of,
    calculated,
    compared,
    first,
    number_of,
    scalars,
    text_of,
    truth_of,
)
from .functions import CHANGING, FUNCTIONS, SPECIAL, Function, array_count, array_to_string
from .parser import (
    KEPT,
    MAX_PATTERN_MEMORY,
    MAX_PATTERN_STEPS,
    MAX_PATTERNS,
    Affix,
    Arithmetic,
    Between,
    Call,
    Comparison,
    Identifier,
    In,
    Is,
    Like,
    Literal,
    Logic,
    Negative,
    Node,
    Not,
    parse,
)
from .paths import ParsedMessage, Read, reader

Found = Callable[[str], bool | None]

#: A pattern without any of these is a plain text, which ``in`` finds ten times as fast.
_SPECIAL = re.compile(r"[\\.^$*+?{}\[\]|()]")


def pattern(text: str) -> Found:
    """Whether a text has it somewhere; NULL where the search could take too long. Raises ValueError with the reason."""
    if not _SPECIAL.search(text):
        return lambda searched: text in searched
    options = re2.Options()
    options.max_mem = MAX_PATTERN_MEMORY
    options.never_capture = True
    options.log_errors = False
    try:
        compiled = re2.compile(text, options=options)
    except re2.error as error:
        raise ValueError(_reason(error)) from None
    search, longest = compiled.search, MAX_PATTERN_STEPS // max(compiled.programsize, 1)

    def found(searched: str) -> bool | None:
        # As bytes: the binding would count the characters up to every match. A body may have half a surrogate pair.
        data = searched.encode("utf-8", "surrogatepass")
        return search(data) is not None if len(data) <= longest else None

    return found


def _reason(error: Exception) -> str:
    """What RE2 says, on one line: it quotes the pattern."""
    said = error.args[0] if error.args else ""
    text = said.decode(errors="replace") if isinstance(said, bytes) else str(said)
    return "".join(sign if sign.isprintable() else " " for sign in text[:100])


#: Nodes whose closures answer TRUE, FALSE or NULL and nothing else.
_ANSWERS = (Comparison, Between, In, Like, Affix, Is, Not, Logic)


class Unusable(Exception):
    """What parses and is no expression all the same: an unknown function, a pattern that RE2 refuses."""

    def __init__(self, column: int, problem: str) -> None:
        self.column, self.problem = column, problem
        super().__init__(problem)


class Compiler:
    """Compiles one tree. ``strict``: NULL in AND and OR as the tables of AMPS have it."""

    def __init__(self, strict: bool) -> None:
        self._strict = strict
        self._patterns = 0
        #: The identifiers, each once, in the order of the text.
        self.identifiers: dict[str, None] = {}

    def value(self, node: Node) -> Read:
        """What it is, arrays included."""
        return self._compile[type(node)](self, node)

    def scalar(self, node: Node) -> Read:
        """What it is, and of an array the first element."""
        read = self.value(node)
        return (lambda message: first(read(message))) if isinstance(node, Identifier) else read

    def truth(self, node: Node) -> Read:
        """Whether it is true: TRUE, FALSE or NULL."""
        return as_truth(node, self.scalar(node))

    # -- values ---------------------------------------------------------------------------------------------------

    def _literal(self, node: Literal) -> Read:
        value = node.value
        return lambda message: value

    def _identifier(self, node: Identifier) -> Read:
        self.identifiers[node.path] = None
        return reader(node.steps)

    def _negative(self, node: Negative) -> Read:
        return self._calculated("-", Literal(node.column, 1, 0), node.operand)

    def _arithmetic(self, node: Arithmetic) -> Read:
        return self._calculated(node.operator, node.left, node.right)

    def _calculated(self, sign: str, left_node: Node, right_node: Node) -> Read:
        operation, left, right = ARITHMETIC[sign], self.scalar(left_node), self.scalar(right_node)
        return lambda message: calculated(operation, left(message), right(message))

    # -- answers --------------------------------------------------------------------------------------------------

    def _comparison(self, node: Comparison) -> Read:
        compare = COMPARISONS[node.operator]
        if isinstance(node.right, Literal):
            return _with_literal(compare, self.value(node.left), node.right.value)
        if isinstance(node.left, Literal):
            return _with_literal(MIRRORED[compare], self.value(node.right), node.left.value)
        left, right = self.value(node.left), self.value(node.right)
        return lambda message: compared(compare, left(message), right(message))

    def _between(self, node: Between) -> Read:
        read, low, high = self.value(node.value), self.scalar(node.low), self.scalar(node.high)

        def between(message: Any) -> bool | None:
            value, lowest, highest = read(message), low(message), high(message)
            if type(value) is list:  # one element has to be above the one and below the other
                return any_of(_between(element, lowest, highest) for element in value)
            return _between(value, lowest, highest)

        return between

    def _in(self, node: In) -> Read:
        read = self.value(node.value)
        if all(isinstance(item, Literal) for item in node.items):
            return _in_literals(read, Known(item.value for item in node.items if isinstance(item, Literal)))
        items = [self.value(item) for item in node.items]

        def contained(message: Any) -> bool | None:
            value = read(message)
            known = Known(chain.from_iterable(_elements(item(message)) for item in items))
            return any_of(map(known.has, _elements(value)))

        return contained

    def _like(self, node: Like) -> Read:
        if node.pattern.value is None:
            return self._literal(node.pattern)
        self._patterns += 1
        if self._patterns > MAX_PATTERNS:
            raise Unusable(node.pattern.column, f"an expression has at most {MAX_PATTERNS} patterns")
        try:
            found = pattern(node.pattern.value)
        except ValueError as error:
            raise Unusable(node.pattern.column, f"RE2 does not accept this pattern: {error}") from None
        return _on_texts(self.value(node.value), found)

    def _affix(self, node: Affix) -> Read:
        read, items = self.value(node.value), [self.scalar(item) for item in node.items]
        test: Any = str.startswith if node.begins else str.endswith

        def affixed(message: Any) -> bool | None:
            texts = [text_of(item(message)) for item in items]
            known = tuple(text for text in texts if text is not None)
            unknown = None if len(known) < len(texts) else False
            answers = (value if value is None else test(text_of(value), known) for value in _elements(read(message)))
            answer = any_of(answers)
            return unknown if answer is False else answer

        return affixed

    def _is(self, node: Is) -> Read:
        read = self.scalar(node.value)
        if node.what == "NULL":
            return lambda message: read(message) is None

        def is_nan(message: Any) -> bool:
            number = number_of(read(message))
            return number is not None and number != number

        return is_nan

    def _not(self, node: Not) -> Read:
        return negation(self.truth(node.operand))

    def _logic(self, node: Logic) -> Read:
        terms = tuple(self.truth(term) for term in node.terms)
        if node.conjunction:
            return (strict_conjunction if self._strict else conjunction)(terms)
        return (strict_disjunction if self._strict else disjunction)(terms)

    # -- functions ------------------------------------------------------------------------------------------------

    def _call(self, node: Call) -> Read:
        name, given = node.name, node.arguments
        if name in CHANGING:
            raise Unusable(node.column, f"{name} depends on more than the message, and is not accepted")
        function = FUNCTIONS.get(name)
        if function is None and name not in SPECIAL:
            known = ", ".join(sorted([*FUNCTIONS, *SPECIAL]))
            raise Unusable(node.column, f"there is no function {name[:40]}; there are {known}")
        min_args, max_args = (function.min_args, function.max_args) if function else SPECIAL[name]
        if len(given) < min_args or (max_args is not None and len(given) > max_args):
            count = (
                f"{min_args} or more"
                if max_args is None
                else f"{min_args}"
                if max_args == min_args
                else f"{min_args} to {max_args}"
            )
            raise Unusable(node.column, f"{name} takes {count} arguments, not {len(given)}")
        return self._function(function, given) if function else self._special(name, given)

    def _function(self, function: Function, given: tuple[Node, ...]) -> Read:
        call, arguments = function.call, [self.scalar(argument) for argument in given]
        if function.takes_null or not arguments:
            return lambda message: call(*[argument(message) for argument in arguments])
        if len(arguments) == 1:
            (only,) = arguments
            return lambda message: None if (value := only(message)) is None else call(value)

        def called(message: Any) -> Any:
            values = [argument(message) for argument in arguments]
            return None if None in values else call(*values)

        return called

    def _special(self, name: str, given: tuple[Node, ...]) -> Read:
        if name == "TOPIC_NAME":
            return lambda message: message.topic or None
        if name == "MESSAGE_SIZE":
            return lambda message: message.size
        if name == "ARRAY_COUNT":
            array = self.value(given[0])
            return lambda message: array_count(array(message))
        if name == "ARRAY_TO_STRING":
            array, separator = self.value(given[0]), self.scalar(given[1])
            return lambda message: array_to_string(array(message), separator(message))
        if name == "IF":
            condition, yes, no = self.truth(given[0]), self.scalar(given[1]), self.scalar(given[2])
            return lambda message: yes(message) if condition(message) else no(message)
        arguments = [self.scalar(argument) for argument in given]

        def coalesce(message: Any) -> Any:
            for argument in arguments:
                value = argument(message)
                if value is not None:
                    return value
            return None

        return coalesce

    _compile: dict[type[Node], Callable[[Compiler, Any], Read]] = {
        Literal: _literal, Identifier: _identifier, Negative: _negative, Arithmetic: _arithmetic,
        Comparison: _comparison, Between: _between, In: _in, Like: _like, Affix: _affix, Is: _is, Not: _not,
        Logic: _logic, Call: _call,
    }  # fmt: skip


def as_truth(node: Node, read: Read) -> Read:
    """The truth of what a node's closure reads."""
    return read if isinstance(node, _ANSWERS) else lambda message: truth_of(read(message))


# -- closures that know a literal ---------------------------------------------------------------------------------


def _with_literal(compare: Compare, read: Read, literal: Any) -> Read:
    if literal is None:
        return lambda message: None
    if type(literal) is str:

        def with_text(message: Any) -> bool | None:
            value = read(message)
            if type(value) is str:
                return compare(value, literal)
            return None if value is None else compared(compare, value, literal)

        return with_text

    def with_number(message: Any) -> bool | None:
        value = read(message)
        kind = type(value)
        if kind is int or kind is float:
            return compare(value, literal)
        return None if value is None else compared(compare, value, literal)

    return with_number


def _in_literals(read: Read, known: Known) -> Read:
    texts, has = known.texts, known.has

    def contained(message: Any) -> bool | None:
        value = read(message)
        if type(value) is str and value in texts:
            return True
        return any_of(map(has, value)) if type(value) is list else has(value)

    return contained


def _on_texts(read: Read, found: Found) -> Read:
    def searched(message: Any) -> bool | None:
        value = read(message)
        if type(value) is str:
            return found(value)
        texts = map(text_of, _elements(value))
        return any_of(text if text is None else found(text) for text in texts)

    return searched


def _elements(value: Any) -> list[Any]:
    return value if type(value) is list else [value]


_AT_LEAST, _AT_MOST = COMPARISONS[">="], COMPARISONS["<="]


def _between(value: Any, low: Any, high: Any) -> bool | None:
    above, below = scalars(_AT_LEAST, value, low), scalars(_AT_MOST, value, high)
    if above is False or below is False:
        return False
    return None if above is None or below is None else True


# -- AND, OR and NOT of three values. Terms are asked from the left, and no more of them than it takes -----------------
#
# SQL-92: NULL is "unknown", and an answer is NULL only where it would depend on what is unknown. The tables that AMPS
# documents differ where the left operand is NULL: then the answer is, whatever stands on the right.
#
# | AND | TRUE | FALSE | NULL | | OR | TRUE | FALSE | NULL |
# | --- | --- | --- | --- | --- | --- | --- | --- | --- |
# | TRUE | TRUE | FALSE | NULL | | TRUE | TRUE | TRUE | TRUE |
# | FALSE | FALSE | FALSE | FALSE | | FALSE | TRUE | FALSE | NULL |
# | NULL | NULL | FALSE (AMPS: NULL) | NULL | | NULL | TRUE (AMPS: NULL) | NULL | NULL |


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
    def any_true(message: Any) -> bool | None:
        unknown = False
        for term in terms:
            answer = term(message)
            if answer:
                return True
            if answer is None:
                unknown = True
        return None if unknown else False

    return any_true


def strict_conjunction(terms: Terms) -> Read:
    def every(message: Any) -> bool | None:
        for term in terms:
            answer = term(message)
            if not answer:
                return answer  # type: ignore[no-any-return]
        return True

    return every


def strict_disjunction(terms: Terms) -> Read:
    def any_true(message: Any) -> bool | None:
        for term in terms:
            answer = term(message)
            if answer is not False:
                return answer  # type: ignore[no-any-return]
        return False

    return any_true


def negation(term: Read) -> Read:
    def negated(message: Any) -> bool | None:
        answer = term(message)
        return None if answer is None else not answer

    return negated


# -- a compiled expression, and the one way to get one ----------------------------------------------------------------

#: What an expression evaluates to; None is NULL.
Value = bool | int | float | str | None


class Expression:
    """An expression that is ready to be evaluated. Has no state: any number of threads may share it."""

    __slots__ = ("_answer", "_evaluate", "identifiers", "strict", "text")

    #: As it was written.
    text: str
    #: NULL in AND and OR as in the tables of AMPS.
    strict: bool
    #: The fields that it may look at, as they were written, each once, in order.
    identifiers: tuple[str, ...]

    def __init__(self, text: str, strict: bool, identifiers: tuple[str, ...], evaluate: Read, answer: Read) -> None:
        self.text, self.strict, self.identifiers = text, strict, identifiers
        self._evaluate, self._answer = evaluate, answer

    def evaluate(self, message: ParsedMessage) -> Value:
        """Its value: a number, a text, a truth, or None for NULL; of an array the first element. Never raises."""
        return self._evaluate(message)  # type: ignore[no-any-return]

    def matches(self, message: ParsedMessage) -> bool:
        """Whether it is true of the message. NULL is no match, nor is a value that is neither true nor false (NaN)."""
        return self._answer(message) is True

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"<expression {self.text!r}{' strict' if self.strict else ''}>"


def compile_expression(text: str, *, strict: bool = False) -> Expression:
    """Compile an expression. Raises InvalidExpression, which has the column and shows it.

    NULL in AND and OR is SQL-92's; ``strict`` takes AMPS's documented tables, in which NULL OR TRUE and NULL AND FALSE
    are NULL. The last ``limits.KEPT`` of them are kept, so compiling the same text again costs a look-up.
    """
    if not isinstance(text, str):
        raise TypeError(f"an expression is a str, not {text!r}")
    return _compiled(text, bool(strict))


@lru_cache(maxsize=KEPT)
def _compiled(text: str, strict: bool) -> Expression:
    tree = parse(text)
    compiler = Compiler(strict)
    try:
        evaluate = compiler.scalar(tree)
    except Unusable as unusable:
        raise InvalidExpression(text, unusable.column, unusable.problem) from None
    return Expression(text, strict, tuple(compiler.identifiers), evaluate, as_truth(tree, evaluate))
