"""What a receive task writes down of the message that it has in hand, for whoever has to account for it if it dies.

The process tree gives each task a slot in memory that outlives the process (``processes.slots``); a pump without a tree
has none.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Protocol


class Slot(Protocol):
    """The slot of one receive task."""

    def lease(self, token: uuid.UUID) -> None:
        """The token under which the messages that follow are held; once per batch."""

    def keep(self, identity: bytes, headers: str) -> None:
        """Id and headers of the message that follows, for one that is nowhere else by then (AT_MOST_ONCE)."""

    def begin(self, seq: int) -> None:
        """A message is in hand: it is read, and handled."""

    def several(self, seqs: Sequence[int]) -> None:
        """What the handler that is about to run, or the one that has ended, was given beside the message that begins; none of
        several is known to be the one in hand."""

    def end(self) -> None:
        """It has ended, well or not."""

    def only_here(self, so: bool) -> None:
        """What is about to be claimed will be in no table until it was handled (AT_MOST_ONCE); or nothing is any more."""
