"""The grammar, the tree that it makes of a text, and what is said of a text that does not follow it.

LALR by Lark, which builds the tree from below without recursion: how deep a text nests is known before anything
recurses over it. The lexer is the one that does not look at the context, because a path is a path wherever it stands:
``/a /b`` is two of them, and the error says so.

Of each node ``column`` is where it stands, ``depth`` how much is inside it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from math import isinf
from typing import Any

from lark import Lark, Token, Transformer, v_args
from lark.exceptions import UnexpectedCharacters, UnexpectedInput, UnexpectedToken

from ..errors import InvalidExpression
from .coercion import Number, fitting
from .paths import Step, steps_of


@dataclass(frozen=True, slots=True)
class Node:
    column: int
    depth: int


@dataclass(frozen=True, slots=True)
class Literal(Node):
    value: Any


@dataclass(frozen=True, slots=True)
class Identifier(Node):
    path: str
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Negative(Node):
    """``-x``"""

    operand: Node


@dataclass(frozen=True, slots=True)
class Arithmetic(Node):
    operator: str
    left: Node
    right: Node


@dataclass(frozen=True, slots=True)
class Comparison(Node):
    operator: str
    left: Node
    right: Node


@dataclass(frozen=True, slots=True)
class Between(Node):
    value: Node
    low: Node
    high: Node


@dataclass(frozen=True, slots=True)
class In(Node):
    value: Node
    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Like(Node):
    value: Node
    pattern: Literal


@dataclass(frozen=True, slots=True)
class Affix(Node):
    """``BEGINS WITH`` and ``ENDS WITH``."""

    begins: bool
    value: Node
    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Is(Node):
    """``IS NULL`` and ``IS NAN``."""

    what: str
    value: Node


@dataclass(frozen=True, slots=True)
class Not(Node):
    operand: Node


@dataclass(frozen=True, slots=True)
class Logic(Node):
    """``AND`` or ``OR`` of two terms or more."""

    conjunction: bool
    terms: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Call(Node):
    name: str
    arguments: tuple[Node, ...]


# -- how large an expression, and what it makes of a message, may become; refused when it is compiled, unless said
# otherwise

#: Characters of an expression. Bounds the time to parse it, and the number of its operators, list items and patterns.
MAX_LENGTH = 4096

#: Operators, calls and parentheses inside one another. Compiling nests five Python calls for each and evaluating four,
#: of the thousand that a thread has.
MAX_DEPTH = 64

#: Characters of a text that a function makes. CONCAT and REPLACE inside one another multiply, so that four of them
#: would make gigabytes of a short body: what would be longer is NULL.
MAX_TEXT = 1 << 20

#: Bytes for RE2's program and automaton of one pattern: a pattern that does not fit is refused.
MAX_PATTERN_MEMORY = 1 << 20

#: Patterns of one expression, and expressions that are kept: together they bound the memory of patterns.
MAX_PATTERNS = 20
KEPT = 250

#: Steps of one search: instructions of the pattern times bytes of the text. RE2 does about 10^8 in a second when every
#: instruction is alive at every byte (measured with ``(?:a|b)*a(?:a|b){200}c`` on a megabyte of a and b), and nearly
#: always far fewer. A LIKE that could take more is NULL.
MAX_PATTERN_STEPS = 100_000_000


_ESCAPE = re.compile(rb"\\(x[0-9A-Fa-f]{1,2}|[0-7]{1,3}|.)", re.DOTALL)

_LETTERS = {b"a": b"\a", b"b": b"\b", b"t": b"\t", b"n": b"\n", b"f": b"\f", b"r": b"\r"}


def number(text: str) -> Number:
    """An unsigned number; of more than 64 bits it is a double."""
    value = fitting(int(text)) if text.isdecimal() else float(text)
    if isinf(value):
        raise ValueError("this number is too large for a double")
    return value


def string(token: str) -> str | None:
    """What a literal with its quotes stands for; '' is NULL."""
    if token[0] in "rR":
        return token[2:-1] or None
    # By bytes, as \xHH and \OOO name them.
    data = _ESCAPE.sub(_unescaped, token[1:-1].encode())
    try:
        return data.decode() or None
    except UnicodeDecodeError:
        raise ValueError("the escapes of this string are not UTF-8") from None


def _unescaped(escape: re.Match[bytes]) -> bytes:
    what = escape[1]
    if what[:1] == b"x" and len(what) > 1:
        return bytes([int(what[1:], 16)])
    if what.isdigit() and what[:1] < b"8":
        return bytes([int(what, 8) & 0xFF])
    return _LETTERS.get(what, what)


_GRAMMAR = r"""
?start: disjunction

?disjunction: conjunction (_OR conjunction)*
?conjunction: negation (_AND negation)*
?negation: predicate
    | NOT negation                              -> negated

?predicate: sum
    | sum COMPARES sum                          -> comparison
    | sum NOT? BETWEEN sum _AND sum             -> between
    | sum NOT? IN items                         -> contained
    | sum NOT? LIKE (STRING | RAW)              -> like
    | sum NOT? (BEGINS | ENDS) _WITH items      -> affix
    | sum IS NOT? (NULL | NAN)                  -> is_

items: "(" disjunction ("," disjunction)* ")"

?sum: product
    | sum (PLUS | MINUS) product                -> arithmetic
?product: sign
    | product (TIMES | DIVIDE | MOD) sign       -> arithmetic
?sign: atom
    | MINUS sign                                -> negative
    | PLUS sign                                 -> positive

?atom: NUMBER                                   -> number
    | (STRING | RAW)                            -> string
    | (TRUE | FALSE | NULL)                     -> constant
    | (PATH | BRACKETED)                        -> identifier
    | NAME "(" [disjunction ("," disjunction)*] ")"   -> call
    | LEFT disjunction ")"                      -> group

LEFT: "("
COMPARES: "==" | "=" | "!=" | "<>" | "<=" | "<" | ">=" | ">"
PLUS: "+"
MINUS: "-"
TIMES: "*"
DIVIDE: /\/(?=[\s(])/
MOD.3: "%" | /mod(?!\w)/i

_OR.3: /or(?!\w)/i
_AND.3: /and(?!\w)/i
NOT.3: /not(?!\w)/i
BETWEEN.3: /between(?!\w)/i
IN.3: /in(?!\w)/i
LIKE.3: /like(?!\w)/i
BEGINS.3: /begins(?!\w)/i
ENDS.3: /ends(?!\w)/i
_WITH.3: /with(?!\w)/i
IS.3: /is(?!\w)/i
NULL.3: /null(?!\w)/i
NAN.3: /nan(?!\w)/i
TRUE.3: /true(?!\w)/i
FALSE.3: /false(?!\w)/i

RAW.4: /[rR]'[^']*'/ | /[rR]"[^"]*"/
STRING.4: /'(?:[^'\\]|\\(.|\n))*'/ | /"(?:[^"\\]|\\(.|\n))*"/
NUMBER.2: /[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?/ | /\.[0-9]+(?:[eE][+-]?[0-9]+)?/
PATH.2: /(?:\/[^\s\/()\[\],=<>!'"+*%]+(?:\[[0-9]{1,9}\])?)+/
BRACKETED.2: /\[(?:\/[^\/\[\]]+)+\](?:\[[0-9]{1,9}\])?/
NAME: /[A-Za-z_]\w*/

WHITESPACE: /\s+/
%ignore WHITESPACE
"""


@v_args(inline=True)
class _Tree(Transformer[Token, Any]):
    """Called by the parser for each rule, with the nodes of what is inside it. Has no state: threads share it."""

    def disjunction(self, *terms: Node) -> Node:
        return Logic(terms[0].column, _above(*terms), False, terms)

    def conjunction(self, *terms: Node) -> Node:
        return Logic(terms[0].column, _above(*terms), True, terms)

    def negated(self, sign: Token, operand: Node) -> Node:
        return Not(_column(sign), _above(operand), operand)

    def comparison(self, left: Node, operator: Token, right: Node) -> Node:
        return Comparison(_column(operator), _above(left, right), str(operator), left, right)

    def between(self, value: Node, *rest: Any) -> Node:
        *signs, low, high = rest
        column = _column(signs[0])
        return _unless(signs, Between(column, _above(value, low, high), value, low, high))

    def contained(self, value: Node, *rest: Any) -> Node:
        *signs, items = rest
        return _unless(signs, In(_column(signs[0]), _above(value, *items), value, items))

    def like(self, value: Node, *rest: Any) -> Node:
        *signs, token = rest
        return _unless(signs, Like(_column(signs[0]), _above(value), value, self.string(token)))

    def affix(self, value: Node, *rest: Any) -> Node:
        *signs, items = rest
        begins = signs[-1].type == "BEGINS"
        return _unless(signs, Affix(_column(signs[0]), _above(value, *items), begins, value, items))

    def is_(self, value: Node, *signs: Token) -> Node:
        return _unless(signs[1:], Is(_column(signs[0]), _above(value), signs[-1].type, value))

    def items(self, *items: Node) -> tuple[Node, ...]:
        return items

    def arithmetic(self, left: Node, operator: Token, right: Node) -> Node:
        return Arithmetic(_column(operator), _above(left, right), str(operator).upper(), left, right)

    def negative(self, sign: Token, operand: Node) -> Node:
        return Negative(_column(sign), _above(operand), operand)

    def positive(self, sign: Token, operand: Node) -> Node:
        zero = Literal(_column(sign), 1, 0)
        return Arithmetic(_column(sign), _above(operand), "+", zero, operand)

    def number(self, token: Token) -> Literal:
        return Literal(_column(token), 1, _literal(number, token))

    def string(self, token: Token) -> Literal:
        return Literal(_column(token), 1, _literal(string, token))

    def constant(self, token: Token) -> Literal:
        return Literal(_column(token), 1, {"TRUE": True, "FALSE": False, "NULL": None}[token.type])

    def identifier(self, token: Token) -> Identifier:
        path = str(token)
        if token.type == "BRACKETED":
            name, _, place = path[1:].partition("]")
            return Identifier(_column(token), 1, path, steps_of(name) + steps_of(place))
        return Identifier(_column(token), 1, path, steps_of(path))

    def call(self, name: Token, *arguments: Node | None) -> Node:
        given = tuple(argument for argument in arguments if argument is not None)
        return Call(_column(name), _above(*given), name.upper(), given)

    def group(self, token: Token, inside: Node) -> Node:
        return replace(inside, depth=_above(inside))


class _Refused(Exception):
    """Said of a column while the parser runs; the text is added where it is known."""

    def __init__(self, column: int, problem: str) -> None:
        self.column, self.problem = column, problem
        super().__init__(problem)


def parse(text: str) -> Node:
    """The tree of an expression. Raises InvalidExpression."""
    if len(text) > MAX_LENGTH:
        raise InvalidExpression(text, MAX_LENGTH + 1, f"an expression has at most {MAX_LENGTH} characters")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidExpression(text, error.start + 1, "this is half of a character (a lone surrogate)") from None
    if "\0" in text:
        raise InvalidExpression(text, text.index("\0") + 1, "a NUL character is not accepted")
    if not text.strip():
        raise InvalidExpression(text, 1, "the expression is empty")
    try:
        return _parser().parse(text)  # type: ignore[return-value]
    except _Refused as refused:
        raise InvalidExpression(text, refused.column, refused.problem) from None
    except UnexpectedInput as error:
        raise InvalidExpression(text, *_unexpected(text, error)) from None


@lru_cache(maxsize=1)
def _parser() -> Lark:
    return Lark(_GRAMMAR, parser="lalr", lexer="basic", transformer=_Tree())


def _column(token: Token) -> int:
    return (token.start_pos or 0) + 1


def _above(*inside: Node) -> int:
    """The depth of a node with these in it."""
    if not inside:
        return 1
    deepest = max(inside, key=lambda node: node.depth)
    if deepest.depth >= MAX_DEPTH:
        raise _Refused(deepest.column, f"operators, calls and parentheses nest more than {MAX_DEPTH} deep here")
    return deepest.depth + 1


def _unless(signs: Any, node: Node) -> Node:
    """``NOT IN`` is NOT of IN, and so are the others."""
    return Not(node.column, _above(node), node) if any(sign.type == "NOT" for sign in signs) else node


def _literal(read: Any, token: Token) -> Any:
    try:
        return read(str(token))
    except ValueError as error:
        raise _Refused(_column(token), str(error)) from None


def _unexpected(text: str, error: UnexpectedInput) -> tuple[int, str]:
    """(column, problem)"""
    if isinstance(error, UnexpectedToken):
        token = error.token
        if token.type == "$END":
            return len(text) + 1, "something is missing at the end"
        hint = ""
        if token.type == "PATH" and not {"PATH", "NUMBER"} & set(error.expected):
            hint = "; a slash that divides has a space behind it"
        elif token.type == "NAME" or _after_a_name(error):
            hint = "; a field is written /name, and a text 'name'"
        return _column(token), f"{_quoted(token)} is not expected here{hint}"
    if isinstance(error, UnexpectedCharacters):
        position = error.pos_in_stream or 0
        sign = text[position]
        if sign in "'\"":
            return position + 1, "this string is not closed"
        if sign == "/":
            return position + 1, "a slash that divides has a space behind it, and a path has no empty step"
        if sign == "[":
            return position + 1, "a subscript is a whole number, as in /list[0], and a bracketed path is closed by ]"
        return position + 1, f"{_quoted(sign)} means nothing here"
    return 1, "the expression does not parse"


def _after_a_name(error: UnexpectedToken) -> bool:
    before: Any = getattr(error.state, "value_stack", None)
    return bool(before) and getattr(before[-1], "type", "") == "NAME"


def _quoted(token: str) -> str:
    return repr(token[:40] + "…" if len(token) > 40 else str(token))
