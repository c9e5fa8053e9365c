"""What follows from the options of ``class Delivery`` about topics and the journal.

A queue has a name, and collects the messages of its underlying topics: those whose name is ``underlying_topic``, or, if
that is a regular expression, those in whose name it is found.

A recovery point says where reading the journal begins: ``epoch``, ``now`` (``creation`` is the same), a bookmark, or a
time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from ... import messages
from ...errors import InvalidOption

#: Longest name of a topic.
MAX_TOPIC = 255


#: The options that are expressions over a message that enters the queue.
EXPRESSIONS = ("filter", "priority", "barrier_expression")


def expressions_of(delivery: Any) -> dict[str, str]:
    """Those of them that a queue has, by name."""
    texts = ((name, getattr(delivery, name, None)) for name in EXPRESSIONS)
    return {name: text for name, text in texts if text is not None}


def accepted_names(types: Iterable[Any] | None) -> frozenset[str] | None:
    """The names of the types that a queue accepts; None: all."""
    if types is None:
        return None
    return frozenset(name for item in types for name in ((item,) if isinstance(item, str) else messages.known_as(item)))


#: What makes a text a regular expression. A dot alone does not: the names of message types have some.
_SIGNS = re.compile(r"[\\^$*+?{}\[\]|()]")


def is_pattern(text: str) -> bool:
    """Whether an underlying topic is a regular expression and not a name."""
    return _SIGNS.search(text) is not None


def topic_name(queue: Any) -> str:
    """What publishers call this queue."""
    return queue.delivery.name or queue.__name__


def underlying_topic(queue: Any) -> str:
    """What it collects: a topic or a regular expression."""
    return queue.delivery.underlying_topic or topic_name(queue)


def topic_pattern(queue: Any) -> re.Pattern[str] | None:
    """The regular expression of its topics; None: it collects one, by name. Raises InvalidOption for one that is
    none."""
    text = underlying_topic(queue)
    if not is_pattern(text):
        return None
    try:
        return re.compile(text)
    except (re.error, OverflowError) as error:
        raise InvalidOption(
            f"{queue._meta.label}.Delivery.underlying_topic", text, f"a name or a regular expression ({error})"
        ) from None


def publish_target(queue: Any) -> str:
    """The topic of what is published to the queue's name. Raises InvalidOption where that is not said."""
    if queue.delivery.default_publish_target:
        return queue.delivery.default_publish_target  # type: ignore[no-any-return]
    text = underlying_topic(queue)
    if is_pattern(text):
        raise InvalidOption(
            f"{queue._meta.label}.Delivery.default_publish_target",
            None,
            f"one of the queue's topics, because underlying_topic = {text!r} is a regular expression",
        )
    return text


def content_type_of(queue: Any) -> str:
    """What a message of this queue is that names no content type; '' where that is JSON. Raises InvalidOption."""
    kind = queue.delivery.message_type
    if kind == "json":
        return ""
    return messages.codec_of(kind, f"{queue._meta.label}.Delivery.message_type").content_type


EPOCH, NOW = "epoch", "now"
#: How points in the journal are written.
POINTS = (
    "'epoch', 'now', 'creation', a bookmark (a whole number), an aware datetime, or an ISO-8601 timestamp (UTC "
    "unless it has a zone)"
)
_WORDS = {EPOCH: EPOCH, NOW: NOW, "creation": NOW}

#: A point as it is meant: one of the two words, a bookmark, or an aware time.
Point = str | int | datetime


def point_of(value: Any) -> Point | None:
    """What a point means; None: it means nothing.

    >>> point_of("2026-11-22T10:00:00")
    datetime.datetime(2026, 11, 22, 10, 0, tzinfo=datetime.timezone.utc)
    """
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value if 0 <= value < 2**63 else None
    if isinstance(value, datetime):
        return None if value.tzinfo is None else _in_utc(value)
    if not isinstance(value, str):
        return None
    text = value.strip().lower()
    if text in _WORDS:
        return _WORDS[text]
    # A year is a number as well: eight digits and more are a time only with their T.
    if text.isascii() and text.isdigit():
        return point_of(int(text))
    try:
        time = datetime.fromisoformat(value.strip())
    except ValueError:
        return None
    return _in_utc(time) if time.tzinfo else time.replace(tzinfo=UTC)


def _in_utc(time: datetime) -> datetime | None:
    """A time as it is stored; None: it is in no year that there is."""
    try:
        return time.astimezone(UTC)
    except OverflowError:
        return None


def point_text(point: Point) -> str:
    """A point as it is kept, the same for all ways to write it."""
    return point.astimezone(UTC).isoformat() if isinstance(point, datetime) else str(point)
