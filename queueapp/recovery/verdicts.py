"""The verdicts, where policies look for them; they live beside what is written down of a failure."""

from __future__ import annotations

from ..poison.verdicts import Discard, Poison, RetryLater, RetryNow, Verdict

__all__ = ["Discard", "Poison", "RetryLater", "RetryNow", "Verdict"]
