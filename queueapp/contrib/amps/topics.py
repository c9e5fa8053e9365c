"""Names of topics, which may be regular expressions, as in AMPS: unanchored."""

from __future__ import annotations

import re
import warnings
from typing import NamedTuple

from ...models.delivery.topics import is_pattern


class LoggedTopic(NamedTuple):
    """A topic that the transaction log keeps; of any type where that is ""."""

    name: str
    message_type: str


def matches(topic: str, name: str) -> bool:
    """Whether ``name`` is this topic, or one of those that this expression names; a broken one names none."""
    if topic == name:
        return True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of sets that Python may read otherwise one day
            return is_pattern(topic) and re.search(topic, name) is not None
    except (re.error, OverflowError, RecursionError):
        return False


def covers(logged: str, topic: str) -> bool:
    """Whether a logged topic has messages of the topic. Two expressions cannot be compared, so they may."""
    if is_pattern(topic):
        return is_pattern(logged) or matches(topic, logged)
    return matches(logged, topic)
