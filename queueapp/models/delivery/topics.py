"""Options of ``class Delivery``: which topics a queue collects, and what of them enters it.

A queue has a name, and collects the messages of its underlying topics: those whose name is ``underlying_topic``, or, if
that is a regular expression, those in whose name it is found. The functions below say what follows from the options.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from typing import Any

from ... import messages
from ...errors import InvalidOption
from ...options import Option

#: Longest name of a topic.
MAX_TOPIC = 255


class Distribution(enum.Enum):
    """Which instances share a queue (the element of AMPS that declares it)."""

    LOCAL = "local"  #: LocalQueue: each database has its own
    QUEUE = "queue"  #: Queue: one over several instances
    GROUP_LOCAL = "group-local"  #: GroupLocalQueue: one over the instances of a group


class FileBackedMetadata(enum.Enum):
    """Whether what a queue knows of its messages is kept in a file. Here it always is in the table, so both mean the
    same."""

    ENABLED = "enabled"

    @classmethod
    def _missing_(cls, value: object) -> FileBackedMetadata | None:
        return cls.ENABLED if value is True else None


#: Refused when the class is created, and not by a check: where no checks run it would be taken for a local queue.
_NOT_BUILT = "queues over several instances are not built yet; each database has its own"


def _is_topic(value: Any) -> bool:
    return bool(value) and len(value) <= MAX_TOPIC and "\0" not in value


def _is_text(value: Any) -> bool:
    return bool(value.strip())


def _are_types(value: Any) -> bool:
    return bool(value) and all(
        bool(one.strip()) if isinstance(one, str) else isinstance(one, type) and (one is dict or messages.is_typed(one))
        for one in value
    )


OPTIONS: tuple[Option, ...] = (
    Option("name", str, None, "Name of the queue for publishers and subscribers (AMPS' Name); None: the name of the "
                              "class.",
           optional=True, accept=_is_topic),
    Option(
        "underlying_topic",
        str,
        None,
        "The topic that the queue collects, or a regular expression that is searched in the names of topics (AMPS' "
        "UnderlyingTopic); None: the queue's name.",
        optional=True,
        accept=_is_topic,
    ),
    Option(
        "default_publish_target",
        str,
        None,
        "Topic of messages that are published to the queue's name (AMPS' DefaultPublishTarget); required if "
        "underlying_topic "
        "is a regular expression, which must match it. None: the underlying topic.",
        optional=True,
        accept=_is_topic,
    ),
    Option(
        "message_type",
        str,
        "json",
        "Codec of bodies, also for expressions (AMPS' MessageType): json, msgpack, binary, or one that register_codec "
        "added.",
        accept=_is_text,
    ),
    Option(
        "types",
        tuple,
        None,
        "Message types that may be sent to the queue: classes, names of types, and `dict` for messages without a type. "
        "A message of another type is refused; a subclass of a class is accepted. None: all.",
        optional=True,
        accept=_are_types,
        words="a tuple of message classes, names of types, or dict, or None",
    ),
    Option("filter", str, None, "An expression: only messages that it matches enter the queue (AMPS' Filter); None: "
                                "all.",
           optional=True, accept=_is_text),
    Option(
        "file_backed_metadata",
        FileBackedMetadata,
        None,
        "AMPS' FileBackedMetadata, \"enabled\" or True. Accepted and without effect: the state of messages is in "
        "the queue's table and survives every restart.",
        optional=True,
    ),
    Option("distribution", Distribution, Distribution.LOCAL,
           "Which instances share the queue (AMPS' LocalQueue, Queue, GroupLocalQueue). Only the first is built.",
           accept=lambda value: value is Distribution.LOCAL, words=f"'local': {_NOT_BUILT}"),
    Option("initial_owner", str, None, "AMPS' InitialOwner, of a group-local queue. Not built yet.",
           optional=True, accept=lambda value: False, words=f"None: {_NOT_BUILT}"),
    Option("group_local_queue_domain", str, None, "AMPS' GroupLocalQueueDomain, of a group-local queue. Not built yet.",
           optional=True, accept=lambda value: False, words=f"None: {_NOT_BUILT}"),
)  # fmt: skip


def accepted_names(types: Iterable[Any] | None) -> frozenset[str] | None:
    """The names of the types that a queue accepts; None: all."""
    if types is None:
        return None
    return frozenset(name for one in types for name in ((one,) if isinstance(one, str) else messages.known_as(one)))


class TopicOptions:
    """The types of these options."""

    name: str | None
    underlying_topic: str | None
    default_publish_target: str | None
    message_type: str
    types: tuple[type | str, ...] | None
    filter: str | None
    file_backed_metadata: FileBackedMetadata | str | bool | None
    distribution: Distribution | str
    initial_owner: str | None
    group_local_queue_domain: str | None


#: The options that are expressions over a message that enters the queue.
EXPRESSIONS = ("filter", "priority", "barrier_expression")


def expressions_of(delivery: Any) -> dict[str, str]:
    """Those of them that a queue has, by name."""
    texts = ((name, getattr(delivery, name, None)) for name in EXPRESSIONS)
    return {name: text for name, text in texts if text is not None}


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
