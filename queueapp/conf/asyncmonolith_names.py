"""Settings under AsyncMonolith's names: each stands for settings of ours, with the bounds of both.

``QUEUEAPP`` takes them beside our own. A number is in the unit that it has there. Whoever says the same thing under two names
and means two things is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from ..errors import InvalidOption


@dataclass(frozen=True, slots=True)
class OriginSetting:
    """One of theirs. ``low`` to ``high`` is what is accepted, ``theirs`` the bound that they check; ``ours`` the settings that it
    sets, each read by ``convert``."""

    name: str
    unit: str
    default: int
    theirs: str
    low: int
    high: int
    ours: tuple[str, ...]
    convert: Callable[[int], Any]
    doc: str

    @property
    def accepted(self) -> str:
        """In words, for errors and docs."""
        return f"a whole number{self.unit and f' of {self.unit}'} from {self.low} to {self.high}"

    def read(self, value: Any, where: str) -> Any:
        """The value of our settings. Raises InvalidOption."""
        if type(value) is not int or not self.low <= value <= self.high:
            raise InvalidOption(f"{where}{self.name}", value, f"{self.accepted} (AsyncMonolith: {self.theirs})")
        return self.convert(value)


def _ms(value: int) -> timedelta:
    return timedelta(milliseconds=value)


def _seconds(value: int) -> timedelta:
    return timedelta(seconds=value)


_BATCH = ("MAX_BATCH", "AT_MOST_ONCE_BATCH")
_BATCH_DOC = "Most messages that a receive task takes at once. It takes fewer where handlers are slow (`BATCH_TARGET`)."

SETTINGS: tuple[OriginSetting, ...] = (
    OriginSetting("MaxAttempts", "", 5, "1 or more", 1, 1000, ("ATTEMPTS",), int,
                  "Attempts before a message is poison. One that kills its process is counted here as well."),
    OriginSetting("AttemptDelay", "seconds", 10, "0 or more", 0, 30 * 86_400, ("RETRY_DELAY",), _seconds,
                  "Wait between two attempts."),
    OriginSetting("ProcessorMaxDelay", "milliseconds", 1000, "1 or more", 100, 3_600_000, ("PEEK_DELAY",), _ms,
                  "Wait after a look that found nothing. Here a wake-up ends it, so below 100 ms it would only cost."),
    OriginSetting("ProcessorMinDelay", "milliseconds", 10, "0 or more, at most ProcessorMaxDelay", 0, 3_600_000, ("CLAIM_PAUSE",), _ms,
                  "Wait after a full batch. There 1 to 9 are none; here without the setting there is none."),
    OriginSetting("ProcessorBatchSize", "", 5, "1 or more", 1, 3500, _BATCH, int, _BATCH_DOC),
    OriginSetting("ConsumerMessageBatchSize", "", 5, "1 or more", 1, 3500, _BATCH, int,
                  "The same: what their documentation calls `ProcessorBatchSize`."),
    OriginSetting("ConsumerMessageProcessorCount", "", 1, "1 or more", 1, 256, ("CONCURRENCY",), int,
                  "Receive tasks of a queue in one worker process."),
    OriginSetting("DefaultConsumerTimeout", "seconds", 10, "1 to 3600", 1, 3600, ("TIMEOUT",), _seconds,
                  "Time limit of a handler. Without the setting there is none here."),
)  # fmt: skip
_BY_NAME = {one.name: one for one in SETTINGS}


def translated(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The settings with theirs as ours. Raises InvalidOption for a value out of bounds, and for two names that disagree."""
    if not any(name in _BY_NAME for name in given):
        return dict(given)
    found = {name: value for name, value in given.items() if name not in _BY_NAME}
    said_by = {name: name for name in found}
    for one in SETTINGS:
        if one.name not in given:
            continue
        value = one.read(given[one.name], where)
        for name in one.ours:
            if name in found and not _same(found[name], value):
                raise InvalidOption(
                    f"{where}{one.name}", given[one.name], f"the same as {said_by[name]} = {given[said_by[name]]!r}, which it is "
                    "another name of"
                )  # fmt: skip
            if name not in found:
                found[name], said_by[name] = value, one.name
    _refuse_longer_pause(given, found, where)
    return found


def _same(ours: Any, value: Any) -> bool:
    """Our durations may be bare seconds."""
    if isinstance(value, timedelta) and type(ours) in (int, float):
        return bool(ours == value.total_seconds())
    return bool(ours == value)


def _refuse_longer_pause(given: Mapping[str, Any], found: Mapping[str, Any], where: str) -> None:
    if "ProcessorMinDelay" not in given:
        return
    longest = found.get("PEEK_DELAY", timedelta(seconds=1))
    if type(longest) in (int, float):
        longest = timedelta(seconds=longest)
    if isinstance(longest, timedelta) and found["CLAIM_PAUSE"] > longest:
        most = int(longest / timedelta(milliseconds=1))
        accepted = f"a whole number of milliseconds from 0 to {most}, which is ProcessorMaxDelay"
        raise InvalidOption(f"{where}ProcessorMinDelay", given["ProcessorMinDelay"], accepted)
