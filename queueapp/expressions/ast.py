"""What the grammar makes of a text: a tree of these. ``column`` is where it stands, ``depth`` how much is inside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .paths import Step


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
