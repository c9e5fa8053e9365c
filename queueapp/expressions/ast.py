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
