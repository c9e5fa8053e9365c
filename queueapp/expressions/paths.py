"""Identifiers: XPath-like ways into a JSON body. What is not there is NULL, never an error.

An object on the way is a step; an array on the way stands for all of its elements, so that the values with an equal
path become one array. Most bodies have neither arrays nor gaps where a filter looks, so that is what is tried first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from ..messages import TOPIC, decode_body, decode_headers, read_head
from .coercion import GREATEST, LEAST, settled


class ParsedMessage(msgspec.Struct, frozen=True, gc=False):
    """One message. ``body`` is made of what JSON has: dicts, lists, strings, numbers, booleans, None; of anything else,
    raw bytes among them, every identifier is NULL. ``topic`` is what TOPIC_NAME() says, and ``size``, in bytes, what
    MESSAGE_SIZE() says; both are NULL where they are not known.
    """

    body: Any = None
    topic: str = ""
    size: int | None = None

    @classmethod
    def stored(
        cls, headers: str, body: bytes | memoryview | None, topic: str = "", content_type: str = ""
    ) -> ParsedMessage:
        """Of a row as it is stored. ``topic`` and ``content_type`` hold for a message that names none of its own; '' is
        JSON. A body that is nothing a codec knows has no fields. Raises UndecodableMessage for one that is not what it
        says it is, and for headers that do not parse.
        """
        raw = None if body is None else bytes(body)
        message_topic = decode_headers(headers).get(TOPIC) if f'"{TOPIC}"' in headers else None
        return cls(decode_body(raw, read_head(headers)[1] or content_type), message_topic or topic, len(raw or b""))


#: Reads something of a message, or computes it.
Read = Callable[[ParsedMessage], Any]

#: The key of an object, or the zero-based place in an array.
Step = str | int

_ARRAYS = (list, tuple)

_STEP = re.compile(r"/([^/\[\]]+)|\[([0-9]+)\]")


def steps_of(path: str) -> tuple[Step, ...]:
    """
    >>> steps_of("/orders[0]/price")
    ('orders', 0, 'price')
    """
    return tuple(name or int(place) for name, place in _STEP.findall(path))


def reader(steps: tuple[Step, ...]) -> Read:
    """A closure that reads one identifier."""
    if len(steps) == 1:
        (only,) = steps

        def read_one(message: ParsedMessage) -> Any:
            try:
                value = message.body.get(only)
            except AttributeError:  # no object
                return walk(message.body, steps)
            kind = type(value)
            if kind is str:
                return value or None
            if kind is float or kind is bool or value is None or (kind is int and LEAST <= value <= GREATEST):
                return value
            return walk(value, ())

        return read_one

    if len(steps) == 2 and all(isinstance(step, str) for step in steps):
        first, two = steps

        def read_two(message: ParsedMessage) -> Any:
            try:
                value = message.body.get(first).get(two)
            except AttributeError:  # the first is not there, or is an array
                return walk(message.body, steps)
            kind = type(value)
            if kind is str:
                return value or None
            if kind is float or kind is bool or value is None or (kind is int and LEAST <= value <= GREATEST):
                return value
            return walk(value, ())

        return read_two

    return lambda message: walk(message.body, steps)


def walk(body: Any, steps: tuple[Step, ...]) -> Any:
    """The value at the end of a path: NULL, a single value, or a list of values that is not empty."""
    nodes, several = [body], False
    for step in steps:
        several = several or any(isinstance(node, _ARRAYS) for node in nodes)
        if isinstance(step, int):
            elements = list(_flat(nodes)) if several else []
            nodes, several = elements[step : step + 1], False
        else:
            nodes = [node[step] for node in _flat(nodes) if isinstance(node, dict) and step in node]
        if not nodes:
            return None
    if not several and not isinstance(nodes[0], _ARRAYS):
        return settled(nodes[0])
    return [settled(node) for node in _flat(nodes) if not isinstance(node, dict)] or None


def _flat(nodes: Iterable[Any]) -> Iterator[Any]:
    """The elements of all arrays among them, and of the arrays in those. Without recursion: a body may nest deeply."""
    waiting = [iter(nodes)]
    while waiting:
        for node in waiting[-1]:
            if isinstance(node, _ARRAYS):
                waiting.append(iter(node))
                break
            yield node
        else:
            waiting.pop()
