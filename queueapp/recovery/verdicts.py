"""The verdicts, where policies look for them."""

from __future__ import annotations

from ..verdicts import Discard, Poison, RetryLater, RetryNow, Verdict

__all__ = ["Discard", "Poison", "RetryLater", "RetryNow", "Verdict"]
