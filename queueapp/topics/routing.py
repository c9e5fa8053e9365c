"""Which queues collect a topic: computed from the queues of this process, and cached until another queue is
declared."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from ..errors import InvalidMessage, shortened
from ..models.delivery.topics import MAX_TOPIC, publish_target, topic_name, topic_pattern, underlying_topic
from ..options import is_storable
from ..registry import queues

#: Topics whose queues are cached. Publishers may use any names, so not all are.
_KEPT = 4096


class _Routes:
    """All queues, by the topics that they collect."""

    def __init__(self) -> None:
        #: Every publisher inserts in the order of declaration, so that two of them never lock in opposite orders.
        self._order: dict[Any, int] = {}
        self._by_topic: dict[str, list[Any]] = {}
        self._by_pattern: list[tuple[re.Pattern[str], Any]] = []
        self._by_name: dict[str, Any] = {}
        for queue in queues:
            self._order[queue] = len(self._order)
            self._by_name.setdefault(topic_name(queue), queue)
            pattern = topic_pattern(queue)
            if pattern is None:
                self._by_topic.setdefault(underlying_topic(queue), []).append(queue)
            else:
                self._by_pattern.append((pattern, queue))

    def target(self, name: str) -> str:
        queue = self._by_name.get(name)
        return name if queue is None else publish_target(queue)

    def of(self, topic: str) -> tuple[Any, ...]:
        found = [*self._by_topic.get(topic, ())]
        found += [queue for pattern, queue in self._by_pattern if pattern.search(topic)]
        return tuple(sorted(found, key=self._order.__getitem__))


@lru_cache(maxsize=1)
def _routes(version: tuple[int, int]) -> _Routes:
    return _Routes()


@lru_cache(maxsize=_KEPT)
def _route(version: tuple[int, int], topic: str) -> tuple[Any, ...]:
    return _routes(version).of(topic)


def resolve(name: str) -> str:
    """The topic of a message published under this name: the name of a queue stands for its ``default_publish_target``.
    Raises InvalidMessage for an invalid topic.

    >>> resolve("Orders")
    'Orders'
    """
    if not name or not is_storable(name, MAX_TOPIC):
        raise InvalidMessage(
            f"topic = {shortened(name)} is not accepted: a string of 1 to {MAX_TOPIC} characters, without NUL and "
            "halves of surrogate pairs."
        )
    return _routes(queues.version).target(name)


def route(topic: str) -> tuple[Any, ...]:
    """The queues that collect a topic, in the order of their declaration. The name of a queue is no topic by itself:
    see ``resolve``.

    >>> route("Orders")
    (<class 'shop.models.Orders'>,)
    """
    return _route(queues.version, topic)


def known_topics() -> list[str]:
    """The names for error messages: of queues, and of topics that queues collect by name."""
    routes = _routes(queues.version)
    return sorted({*routes._by_name, *routes._by_topic})


def forget() -> None:
    """Clear the cache (tests that change the options of a queue)."""
    _routes.cache_clear()
    _route.cache_clear()
