"""The filter of one subscriber: it takes only messages of which the expression is true, and leaves the others to other
subscribers."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from .. import registry
from ..errors import InvalidOption, QueueNotFound, UndecodableMessage
from ..models.delivery.topics import content_type_of, publish_target


class SubscriberFilter:
    """An expression over the messages of one queue. Raises InvalidExpression, and ImportError without the extra."""

    def __init__(self, text: str, label: str) -> None:
        # Only a process that filters needs the extra.
        from ..expressions import ParsedMessage, compile_expression

        self.text = text
        self._topic, self._content_type = _unsaid(label)
        _refuse_encrypted(label)
        self._expression = compile_expression(text)
        self._parse = ParsedMessage.stored

    def passes(self, headers: str, body: Any) -> bool:
        """Whether this subscriber takes a message. One that cannot be parsed passes: its receiver moves it to poison,
        while it would stay in the queue otherwise."""
        try:
            message = self._parse(headers, body, self._topic, self._content_type)
        except UndecodableMessage:
            return True
        return self._expression.matches(message)


def _refuse_encrypted(label: str) -> None:
    """Raise InvalidOption for a queue whose bodies no filter can read."""
    try:
        queue = registry.queues.find(label)
    except QueueNotFound:
        return
    if queue.delivery.encrypts:
        raise InvalidOption("filter", label, "of a queue whose bodies can be read: those of this one are encrypted")


def _unsaid(label: str) -> tuple[str, str]:
    """(topic, content type) of a message of this queue that names neither."""
    try:
        queue = registry.queues.find(label)
        return publish_target(queue), content_type_of(queue)
    except (QueueNotFound, InvalidOption):
        return label, ""


@lru_cache(maxsize=256)
def filter_of(text: str, label: str) -> SubscriberFilter | None:
    """The filter in a subscriber's row; None: it has none, or one that this version cannot read."""
    if not text:
        return None
    try:
        return SubscriberFilter(text, label)
    except (ValueError, ImportError, InvalidOption):
        return None
