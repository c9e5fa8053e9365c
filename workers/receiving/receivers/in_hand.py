"""What a task has in hand: its supervisor reads it in shared memory if the process dies of it, and counts its attempt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ..quarantine import Quarantine
from ..slot import Slot


class TakesInHand:
    """The part of a task that says what it has in hand, and waits for its turn where one may be the killer of its process."""

    def __init__(self, slot: Slot | None, suspects: Quarantine) -> None:
        self.slot = slot
        self._suspects = suspects
        #: Its handler runs or is about to.
        self.inside = False

    @contextmanager
    def only_here(self) -> Iterator[None]:
        """What is claimed in here is in no table until it was handled. Said from before the claim, so that whoever sees the table
        empty sees this."""
        if self.slot is None:
            yield
            return
        self.slot.only_here(True)
        try:
            yield
        finally:
            self.slot.only_here(False)

    def begin(self, seq: int, suspect: bool) -> None:
        """A message is in hand until ``end``: what reads it (a codec, a class of the user's) may kill the process as well as its
        handler does. Waits for its turn first: one that waited in hand would be counted with the killer that had it."""
        suspects = self._suspects
        self.inside = True
        if suspect or suspects.wanted:
            suspects.enter(self, suspect)
        if self.slot is not None:
            self.slot.begin(seq)

    def end(self, suspect: bool) -> None:
        """It is not in hand any more."""
        if self.slot is not None:
            self.slot.end()
        self.inside = False
        suspects = self._suspects
        if suspects.wanted:
            suspects.leave(suspect)

    @contextmanager
    def in_hand(self, seqs: Sequence[int], suspect: bool) -> Iterator[None]:
        """As from ``begin`` to ``end``, for messages that one call takes; nobody knows which of several it was."""
        several = self.slot if len(seqs) > 1 else None
        if several is not None:
            several.several(seqs)
        try:
            self.begin(seqs[0], suspect)
            yield
        finally:
            self.end(suspect)
            if several is not None:
                several.several(())
