"""What can be decided about a message whose attempt failed."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta


@dataclass(frozen=True, slots=True)
class RetryNow:
    """Put the message back in its place; it is received again at once."""


@dataclass(frozen=True, slots=True)
class RetryLater:
    """Move the message to the delayed store; it comes back to its queue after ``delay``."""

    delay: timedelta


@dataclass(frozen=True, slots=True)
class Poison:
    """Move the message to the poison table, with this reason in one line."""

    reason: str


@dataclass(frozen=True, slots=True)
class Discard:
    """Drop the message for good; the reason is logged."""

    reason: str = ""


Verdict = RetryNow | RetryLater | Poison | Discard
