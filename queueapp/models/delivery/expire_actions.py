"""What becomes of a message that a queue has given up: one small class for each, of which ``Delivery.on_expired`` takes
one.

A message is given up for one or several of four reasons. Whatever is done with it is done in the transaction that takes
it out of its queue (``poison.ending``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ...errors import InvalidOption
from ...options import is_storable
from .topics import MAX_TOPIC

TIME_LIMIT, FORCED_EXPIRE = "time_limit", "forced_expire"
MAX_CANCELS, MAX_DELIVERIES = "max_cancels", "max_deliveries"
#: In the order in which they are named, as AMPS calls them: its time was over; a receiver said so; given back too
#: often; handed out too often.
REASONS = (TIME_LIMIT, FORCED_EXPIRE, MAX_CANCELS, MAX_DELIVERIES)


class OnExpired:
    """One of the classes below."""

    reasons: Iterable[str]

    def __post_init__(self) -> None:
        wanted = (self.reasons,) if isinstance(self.reasons, str) else tuple(self.reasons)
        if not wanted or not set(wanted) <= set(REASONS):
            accepted = "some of " + ", ".join(map(repr, REASONS))
            raise InvalidOption(f"{type(self).__name__}.reasons", self.reasons, accepted)
        object.__setattr__(self, "reasons", tuple(reason for reason in REASONS if reason in wanted))


@dataclass(frozen=True)
class Drop(OnExpired):
    """The message is gone. What is given up for other ``reasons`` becomes poison."""

    reasons: Iterable[str] = (TIME_LIMIT, FORCED_EXPIRE)


@dataclass(frozen=True)
class KeepAsPoison(OnExpired):
    """The message becomes poison, with its reasons. What is given up for others goes as by default (``Drop()``)."""

    reasons: Iterable[str] = REASONS


@dataclass(frozen=True)
class PublishTo(OnExpired):
    """The message is published to a topic. What is given up for other ``reasons`` goes as by default (``Drop()``)."""

    topic: str
    reasons: Iterable[str] = REASONS

    def __post_init__(self) -> None:
        if not is_storable(self.topic, MAX_TOPIC) or not self.topic.strip():
            raise InvalidOption("PublishTo.topic", self.topic, f"the name of a topic: 1 to {MAX_TOPIC} characters")
        super().__post_init__()


def action_for(on_expired: OnExpired, reasons: Iterable[str]) -> OnExpired:
    """What is done with a message that is given up for these reasons: what the queue says if it names one of them (to
    drop it, all of them), else what is done by default, by which a limit makes poison."""
    given, named = set(reasons), set(on_expired.reasons)
    if named & given if not isinstance(on_expired, Drop) else given <= named:
        return on_expired
    return Drop() if given <= {TIME_LIMIT, FORCED_EXPIRE} else KeepAsPoison()
