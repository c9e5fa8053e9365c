"""What lies behind a floor and need not be walked over again.

Beside an old snapshot the dead rows of all that was handled stay where they were, and the rescan walks over them again and
again, for a tenth of the time (two million of them, two processors: 45 of the 440 ms in which 100,000 messages are handled, and
a late commit waits for seconds until a look comes by). But where a look saw no message at all, taken or free, and all
transactions are over that had begun when the seqs there were given, none can come any more: what comes back has been in the
table all the time, and what is sent gets a higher seq.

That is so of what this system does. Somebody may insert a row by hand, or a session keep seqs for later (``CACHE``): so what is
settled is walked over all the same, for a hundredth of the time.
"""

from __future__ import annotations

from time import monotonic

from ..sql.claimed import Given, Range

#: After a walk over all, from the very beginning, no other for so many times as long.
REST_OF_SETTLED = 99
#: Where such a walk takes no longer, in seconds, it is made each time.
WORTH_SETTLING = 0.02
#: Seconds between two questions for what was given; one takes the server a tenth of a millisecond.
ASK_EVERY = 0.1
#: So many walks in a row are made in vain on a queue that is quiet: an old transaction may be open for hours.
MOST_IN_VAIN = 3
#: Fewer messages than these are walked over in a millisecond.
FEW = 10_000


class Settled:
    """Up to where that is so, from the beginning of a queue without recipients and levels. As the floors it is shared without a
    lock: what was lost of it is walked over once more."""

    __slots__ = ("_again_at", "_floor", "_in_vain", "_mark", "_walk", "ask_at", "over", "to")

    def __init__(self) -> None:
        self._walk = self._again_at = 0.0
        self.forget()

    def forget(self) -> None:
        """Nothing is known any more: the next look may go to another server, or the seqs have begun again."""
        #: No message is below this seq, and none will be.
        self.to = 0
        #: Below this one nobody can bring any more messages: a look from now on sees what there is.
        self.over = 0
        #: A floor, and the transaction at which all those are over that may bring messages below it.
        self._mark: tuple[int, int] | None = None
        self.ask_at = 0.0
        #: The floor when there was much to settle, and how many walks have settled nothing since then.
        self._floor = self._in_vain = 0

    @property
    def asks(self) -> bool:
        """Whether ``told`` is wanted now."""
        return self._walk > WORTH_SETTLING and monotonic() >= self.ask_at

    def is_due(self, floor: int) -> bool:
        """Whether looks that follow soon would settle what is behind this floor: where nothing is to be handled they cost
        nobody anything, and when the next messages come they are handled beside a shorter walk."""
        return self._walk > WORTH_SETTLING and floor - self.to > FEW and self._in_vain < MOST_IN_VAIN

    def told(self, given: Given | None, floor: int) -> None:
        """What the database told; ``floor``: as it was before it was asked."""
        self.ask_at = monotonic() + ASK_EVERY
        if floor - self._floor > FEW:
            self._floor, self._in_vain = floor, 0
        if given is None or given.seq + 1 < max(floor, self.to):
            # A floor above all that was given is somebody's who has chosen a seq: others will be below it.
            self.forget()
            self.ask_at, self._in_vain = monotonic() + 1.0, MOST_IN_VAIN
            return
        mark = self._mark
        if mark is None or given.oldest >= mark[1]:
            self._mark = floor, given.following
            self.over = mark[0] if mark else 0

    def saw_none(self, looked: Range, end: int) -> None:
        """A look saw no message in this range below the seq ``end``, which is no higher than ``over`` was before it."""
        if looked.low <= self.to < end:
            self.to, self._in_vain = end, 0

    def lower(self, seq: int) -> None:
        """Here is one, whoever has said so."""
        self.to = min(self.to, seq)

    def walked(self, seconds: float, *, all_: bool = True) -> None:
        """A walk has taken so long that ends at the floor, and has begun at the very beginning or (``all_=False``) at ``begin``."""
        self._in_vain += 1
        if all_:
            self._walk = seconds
            self._again_at = monotonic() + REST_OF_SETTLED * seconds

    @property
    def begin(self) -> int:
        """Where the next walk begins."""
        return self.to if self._walk > WORTH_SETTLING and monotonic() < self._again_at else 0
