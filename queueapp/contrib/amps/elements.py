"""The elements of a queue in AMPS: the option of ``class Delivery`` for each, and how its text is read.

One line per element of AMPS' page; ``convert`` applies them, ``docs/reference/amps.md`` describes each.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

from ...errors import InvalidExpression, InvalidOption
from ...messages.bodies import codec_of
from ...models.delivery import OPTIONS
from ...models.delivery.options import REASONS
from .xml_reader import NotMapped, shown

LINE = 120


def text_literal(text: str) -> str:
    """A string; in double quotes unless single ones save a backslash. What cannot be printed is escaped.

    >>> print(text_literal('/a = "x"'), text_literal("it's"))
    '/a = "x"' "it's"
    """
    # With a double quote in it, repr always takes single ones.
    inside = repr('"' + text)[2:-1]
    if text.count('"') > text.count("'"):
        return f"'{inside}'"
    return '"' + inside.replace("\\'", "'").replace('"', '\\"') + '"'


def time_literal(time: timedelta) -> str:
    """A timedelta in the largest unit that it is a whole number of.

    >>> time_literal(timedelta(seconds=900)), time_literal(timedelta(microseconds=1_500_000))
    ('timedelta(minutes=15)', 'timedelta(milliseconds=1500)')
    """
    for unit in ("days", "hours", "minutes", "seconds", "milliseconds", "microseconds"):
        whole, rest = divmod(time, timedelta(**{unit: 1}))
        if not rest and (whole or unit == "seconds"):
            return f"timedelta({unit}={whole})"
    raise AssertionError("a timedelta has no part below a microsecond")


def assignment(name: str, source: str, indent: int) -> list[str]:
    """``name = source``; in parentheses where that makes it fit into a line."""
    line = f"{' ' * indent}{name} = {source}"
    if len(line) > LINE and indent + 4 + len(source) <= LINE:
        return [f"{' ' * indent}{name} = (", f"{' ' * (indent + 4)}{source}", f"{' ' * indent})"]
    return [line]


#: The elements that define a queue, and whether it is one of this instance alone.
QUEUES = {"Queue": False, "QueueDefinition": False, "LocalQueue": True, "GroupLocalQueue": False}

_DECLARED = {option.name: option for option in OPTIONS}


@dataclass(frozen=True, slots=True)
class Value:
    """A value as the option takes it, and as it is written in a class."""

    value: Any
    source: str


Reader = Callable[[str], Value]


@dataclass(frozen=True, slots=True)
class Known:
    """One element of a queue. ``leases``: it has no effect, in AMPS and here, on a queue without leases."""

    name: str
    option: str
    read: Reader
    leases: bool = False

    def mapped(self, text: str) -> Value:
        """The value of the option. Raises NotMapped, also for one that is out of the option's bounds."""
        if not text:
            raise NotMapped("it is empty")
        value = self.read(text)
        try:
            _DECLARED[self.option].read(value.value)
        except InvalidOption as error:
            raise NotMapped(f"{shown(text)!r} is not accepted here: {self.option} must be {error.accepted}") from error
        return value


def _text(text: str) -> Value:
    return Value(text, text_literal(text))


def _message_type(text: str) -> Value:
    """A type that has a codec. Any other is written too: a check refuses it, where JSON would be a guess."""
    value = _text(text.lower())
    try:
        codec_of(value.value)
    except InvalidOption as error:
        raise NotMapped(f"{shown(text)!r} is not read here: it must be {error.accepted}", value) from error
    return value


def _interval(text: str) -> Value:
    time = interval(text)
    return Value(time, time_literal(time))


def _count(text: str) -> Value:
    number = count(text)
    return Value(number, str(number))


def _one_of(enumeration: str, **members: str) -> Reader:
    """One of AMPS' words, each of which is a member of an enumeration; ``_`` stands for the hyphen in the words."""
    words = {word.replace("_", "-"): member for word, member in members.items()}

    def read(text: str) -> Value:
        word = text.lower()
        if word not in words:
            raise NotMapped(f"{shown(text)!r} is none of {', '.join(words)}")
        return Value(word, f"{enumeration}.{words[word]}")

    return read


def _enabled(text: str) -> Value:
    if text.lower() != "enabled":
        raise NotMapped(f"{shown(text)!r} is not 'enabled', the only value that it has")
    return Value(True, "True")


def _expression(text: str) -> Value:
    """An expression that compiles. Without the extra it is not checked."""
    try:
        from ...expressions import compile_expression
    except ImportError:
        return _text(text)
    try:
        compile_expression(text)
    except InvalidExpression as error:
        raise NotMapped(f"{shown(text)!r} is no expression here: {shown(str(error).splitlines()[0])}") from error
    return _text(text)


#: AMPS' own timestamps: 20141031T140000.123Z. The zone is always UTC.
_TIMESTAMP = re.compile(r"(\d{4})-?(\d\d)-?(\d\d)T(\d\d):?(\d\d):?(\d\d)(\.\d{1,6})?Z?", re.ASCII)
_BOOKMARK = re.compile(r"\d+\|\d+\|.*", re.ASCII)


def _recovery_point(text: str) -> Value:
    if text.lower() in ("epoch", "now", "creation"):
        return _text(text.lower())
    if found := _TIMESTAMP.fullmatch(text):
        fraction = int((found[7] or ".0")[1:].ljust(6, "0"))
        try:
            when = datetime(*(int(part) for part in found.groups()[:6]), fraction, tzinfo=UTC)  # type: ignore[misc, arg-type]
        except ValueError as error:
            raise NotMapped(f"{shown(text)!r} is no time: {error}") from None
        return _text(when.isoformat().replace("+00:00", "Z"))
    if _BOOKMARK.fullmatch(text):
        raise NotMapped("a bookmark names a message of AMPS' transaction log, which is not here")
    raise NotMapped(f"{shown(text)!r} is none of epoch, now, creation, and no timestamp as AMPS writes it")


def _max_attempts() -> str:
    high = _DECLARED["attempts"].high
    return str(high)


ELEMENTS: dict[str, Known] = {
    known.name: known
    for known in (
        Known("Name", "name", _text),
        Known("MessageType", "message_type", _message_type),
        Known("UnderlyingTopic", "underlying_topic", _text),
        Known("DefaultPublishTarget", "default_publish_target", _text),
        Known("Filter", "filter", _expression),
        Known(
            "Semantics",
            "semantics",
            _one_of("Semantics", at_least_once="AT_LEAST_ONCE", at_most_once="AT_MOST_ONCE"),
        ),
        Known("LeasePeriod", "lease_period", _interval, leases=True),
        Known("Leasing", "leasing", _one_of("Leasing", strict="STRICT", sublet="SUBLET"), leases=True),
        Known("MaxDeliveries", "max_deliveries", _count, leases=True),
        Known("MaxCancels", "max_cancels", _count, leases=True),
        Known("Expiration", "expiration", _interval),
        Known(
            "ExpirationModel",
            "expiration_model",
            _one_of("ExpirationModel", default="DEFAULT", queue="QUEUE", latest="LATEST", earliest="EARLIEST"),
        ),
        Known("DeferredAckExpiration", "deferred_ack_expiration", _interval, leases=True),
        Known("MaxBacklog", "max_backlog", _count),
        Known("MaxPerSubscriptionBacklog", "max_per_subscription_backlog", _count),
        Known(
            "FairnessModel",
            "fairness_model",
            _one_of("FairnessModel", fast="FAST", round_robin="ROUND_ROBIN", proportional="PROPORTIONAL"),
        ),
        Known("Priority", "priority", _expression),
        Known("BarrierExpression", "barrier_expression", _expression),
        Known("TargetQueueDepth", "target_queue_depth", _count),
        Known("FileBackedMetadata", "file_backed_metadata", _enabled),
        Known("RecoveryPoint", "recovery_point", _recovery_point),
    )
}
#: Elements of a queue that several instances share.
DISTRIBUTED = ("InitialOwner", "GroupLocalQueueDomain")

#: AMPS' defaults where ours differ; written out, so that a queue behaves as before.
WRITTEN_OUT = {
    "at-least-once": {
        "Leasing": "Leasing.SUBLET",
        "LeasePeriod": "None",
        "MaxPerSubscriptionBacklog": "1",
        "FairnessModel": "FairnessModel.PROPORTIONAL",
    },
    "at-most-once": {"MaxPerSubscriptionBacklog": "1", "FairnessModel": "FairnessModel.ROUND_ROBIN"},
}
#: AMPS' behaviour that has no element: expired messages are dropped for each reason, and a failed handler cancels its
#: message again and again. ``attempts`` has a maximum here.
DROP_ALL = f"Drop(({', '.join(map(text_literal, REASONS))}))"
MAX_ATTEMPTS = _max_attempts()
#: The default of a queue whose topic the transaction log keeps.
DEFERRED_ACKS = time_literal(timedelta(days=1))

#: Which of a queue's options does not go with which others; the first stays.
EXCLUDED = (
    ("Priority", "BarrierExpression"),
    ("Priority", "TargetQueueDepth"),
    ("BarrierExpression", "TargetQueueDepth"),
)


# -- numbers and intervals as AMPS' configuration writes them, and its variables ---------------------------------------

_NUMBER = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([a-z]*)", re.IGNORECASE | re.ASCII)
_VARIABLE = re.compile(r"\$\{([^{}]*)\}")

_NANOSECONDS = {
    "ns": 1,
    "us": 10**3,
    "ms": 10**6,
    "s": 10**9,
    "m": 60 * 10**9,
    "h": 3600 * 10**9,
    "d": 86_400 * 10**9,
    "w": 7 * 86_400 * 10**9,
}
_COUNTS = {"": 1, "k": 10**3, "m": 10**6}
_BYTES = ("kb", "mb", "gb", "tb")


def interval(text: str) -> timedelta:
    """``15m`` as a time. Raises NotMapped; what is finer than a microsecond is not rounded away."""
    found = _NUMBER.fullmatch(text)
    unit = found[2].lower() if found else ""
    if found is None or unit not in _NANOSECONDS:
        raise NotMapped(f"{shown(text)!r} is no interval: a number with a unit, one of {', '.join(_NANOSECONDS)}")
    nanoseconds = Decimal(found[1]) * _NANOSECONDS[unit]
    if nanoseconds % 1000:
        raise NotMapped(f"{shown(text)!r} is finer than a microsecond")
    try:
        return timedelta(microseconds=int(nanoseconds // 1000))
    except OverflowError:
        raise NotMapped(f"{shown(text)!r} is longer than {timedelta.max.days} days") from None


def count(text: str) -> int:
    """``10k`` as a number. Raises NotMapped."""
    found = _NUMBER.fullmatch(text)
    unit = found[2].lower() if found else ""
    if unit in _BYTES:
        raise NotMapped(f"{shown(text)!r} counts bytes, and this counts messages")
    if found is None or unit not in _COUNTS:
        raise NotMapped(f"{shown(text)!r} is no whole number, with k or M for a thousand or a million")
    number = Decimal(found[1]) * _COUNTS[unit]
    if number % 1:
        raise NotMapped(f"{shown(text)!r} is no whole number")
    return int(number)


def with_variables(text: str, environment: Mapping[str, str]) -> str:
    """The text with each ``${NAME}`` replaced, once: what is put in is not read again. Raises NotMapped for one that is
    not set."""

    def value(found: re.Match[str]) -> str:
        if found[1] not in environment:
            raise NotMapped(f"the variable ${{{shown(found[1])}}} is not set in the environment of this command")
        text = environment[found[1]]
        if any("\ud800" <= sign <= "\udfff" for sign in text):
            raise NotMapped(f"what the variable ${{{shown(found[1])}}} holds is no text")
        return text

    return _VARIABLE.sub(value, text)
