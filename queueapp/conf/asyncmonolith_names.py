"""Settings under AsyncMonolith's names. Each is an alias of one or more of our settings, within the bounds of both.

``QUEUEAPP`` accepts them beside ours, in AsyncMonolith's units. Two names of one setting with different values are
refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from ..errors import InvalidOption


@dataclass(frozen=True, slots=True)
class SettingAlias:
    """One of AsyncMonolith's settings. ``low`` to ``high`` is accepted here, ``asyncmonolith_bound`` is the bound that
    AsyncMonolith checks; ``settings`` are the settings that it sets, with the value that ``convert`` returns."""

    name: str
    unit: str
    default: int
    asyncmonolith_bound: str
    low: int
    high: int
    settings: tuple[str, ...]
    convert: Callable[[int], Any]
    doc: str

    @property
    def accepted(self) -> str:
        """The accepted values in words, for errors and docs."""
        return f"a whole number{self.unit and f' of {self.unit}'} from {self.low} to {self.high}"

    def read(self, value: Any, where: str) -> Any:
        """The value of our settings. Raises InvalidOption."""
        if type(value) is not int or not self.low <= value <= self.high:
            raise InvalidOption(
                f"{where}{self.name}", value, f"{self.accepted} (AsyncMonolith: {self.asyncmonolith_bound})"
            )
        return self.convert(value)


def _ms(value: int) -> timedelta:
    return timedelta(milliseconds=value)


def _seconds(value: int) -> timedelta:
    return timedelta(seconds=value)


_BATCH = ("MAX_BATCH", "AT_MOST_ONCE_BATCH")
_BATCH_DOC = "Largest batch of a receiver. Batches are smaller where handlers are slow (`BATCH_TARGET`)."

SETTINGS: tuple[SettingAlias, ...] = (
    SettingAlias(
        "MaxAttempts",
        "",
        5,
        "1 or more",
        1,
        1000,
        ("ATTEMPTS",),
        int,
        "Attempts before a message is poison. An attempt that kills its process counts as well.",
    ),
    SettingAlias(
        "AttemptDelay",
        "seconds",
        10,
        "0 or more",
        0,
        30 * 86_400,
        ("RETRY_DELAY",),
        _seconds,
        "Wait between two attempts.",
    ),
    SettingAlias(
        "ProcessorMaxDelay",
        "milliseconds",
        1000,
        "1 or more",
        100,
        3_600_000,
        ("PEEK_DELAY",),
        _ms,
        "Wait after an empty peek. A notification ends it, so less than 100 ms would only cost statements.",
    ),
    SettingAlias(
        "ProcessorMinDelay",
        "milliseconds",
        10,
        "0 or more, at most ProcessorMaxDelay",
        0,
        3_600_000,
        ("CLAIM_PAUSE",),
        _ms,
        "Wait after a full batch; default: none. AsyncMonolith does not wait for values from 1 to 9.",
    ),
    SettingAlias("ProcessorBatchSize", "", 5, "1 or more", 1, 3500, _BATCH, int, _BATCH_DOC),
    SettingAlias(
        "ConsumerMessageBatchSize",
        "",
        5,
        "1 or more",
        1,
        3500,
        _BATCH,
        int,
        "The same; AsyncMonolith's documentation calls it `ProcessorBatchSize`.",
    ),
    SettingAlias(
        "ConsumerMessageProcessorCount",
        "",
        1,
        "1 or more",
        1,
        256,
        ("CONCURRENCY",),
        int,
        "Receivers of a queue in one worker process.",
    ),
    SettingAlias(
        "DefaultConsumerTimeout",
        "seconds",
        10,
        "1 to 3600",
        1,
        3600,
        ("TIMEOUT",),
        _seconds,
        "Time limit of a handler; default: none.",
    ),
)
ALIASES = frozenset(alias.name for alias in SETTINGS)


def translated(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """``given`` with aliases replaced by our settings. Raises InvalidOption for a value out of bounds, and for names
    that disagree."""
    if not any(name in ALIASES for name in given):
        return dict(given)
    found = {name: value for name, value in given.items() if name not in ALIASES}
    source = {name: name for name in found}
    for alias in SETTINGS:
        if alias.name not in given:
            continue
        value = alias.read(given[alias.name], where)
        for name in alias.settings:
            if name in found and not _is_equal(found[name], value):
                raise InvalidOption(
                    f"{where}{alias.name}", given[alias.name], f"the same as {source[name]} = {given[source[name]]!r}: "
                                                               f"both set {name}"
                )  # fmt: skip
            if name not in found:
                found[name], source[name] = value, alias.name
    _refuse_longer_pause(given, found, where)
    return found


def _is_equal(setting: Any, value: Any) -> bool:
    """Whether two values are equal; durations of ours may be bare seconds."""
    if isinstance(value, timedelta) and type(setting) in (int, float):
        return bool(setting == value.total_seconds())
    return bool(setting == value)


def _refuse_longer_pause(given: Mapping[str, Any], found: Mapping[str, Any], where: str) -> None:
    if "ProcessorMinDelay" not in given:
        return
    max_pause = found.get("PEEK_DELAY", timedelta(seconds=1))
    if type(max_pause) in (int, float):
        max_pause = timedelta(seconds=max_pause)
    if isinstance(max_pause, timedelta) and found["CLAIM_PAUSE"] > max_pause:
        milliseconds = int(max_pause / timedelta(milliseconds=1))
        accepted = f"a whole number of milliseconds from 0 to {milliseconds}, which is ProcessorMaxDelay"
        raise InvalidOption(f"{where}ProcessorMinDelay", given["ProcessorMinDelay"], accepted)
