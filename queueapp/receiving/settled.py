"""What lies behind a floor and need not be walked over again and again.

Beside an old snapshot the dead rows of all that was handled stay where they were, and a rescan that walks over them takes a tenth
of the time (two million of them, two processors: 45 of the 440 ms in which 100,000 messages are handled; a late commit waits
for seconds until the look comes by). But where a look saw no message at all, taken or free, and all transactions are over
that may have been given a seq there, none can come any more: what comes back has been in the table all the time, and what
is sent gets a higher seq.

Who is given a seq holds the lock to write into the table before that and until its end, so those are the transactions that
held it when the floor had got there. (Their numbers do not tell: a COPY, and an INSERT whose trigger waits, have seqs before
they have a number.)

That is so of what this system does. Somebody may insert a row with a seq of his own, or a session keep some for later
(``CACHE``): so what is settled is walked over all the same, for a hundredth of the time, and where that finds a message
nothing is believed to be settled in this process any more.
"""

from __future__ import annotations

import math
from collections.abc import Set
from time import monotonic
from typing import NamedTuple

from ..sql.claimed import Peek, Range
from .scan_window import REST

#: Where a walk over all that is not settled takes the server no longer, in seconds, there is nothing to be gained.
BRIEF = 0.001
#: Seconds between two questions for who writes, and at least so many times as long as one takes; up to so many while somebody
#: goes on writing, who may do that for hours.
ASK_EVERY, REST_OF_ASKING, ASK_SELDOM = 0.1, 99, 5.0
#: After a look at what is settled no other for so many times as long; but for no more than so many seconds where only that one was
#: slow (a disk, a busy machine), unless that were more than a tenth of the time.
REST_OF_SETTLED, LONGEST_REST = 99, 10.0


class Before(NamedTuple):
    """What was known before a look began: another one may be under way, or learn more meanwhile."""

    #: How often a floor had come down.
    came_down: int
    #: See ``Settled``.
    over: int
    to: int
    era: int


class Mark:
    """A floor, and who may bring messages below it."""

    __slots__ = ("floor", "writers")

    def __init__(self, floor: int = 0, writers: Set[str] = frozenset()) -> None:
        self.floor = floor
        self.writers = writers

    def is_over(self, writers: Set[str]) -> bool:
        """Whether none of them is among those who write now. One that was prepared before the server was started anew (``-1/...``)
        had another name then."""
        return not (self.writers & writers or any(name.startswith("-1/") for name in writers))


class Question(NamedTuple):
    """What is to be known of when it was asked: others may ask meanwhile, and be answered sooner."""

    floor: int
    mark: Mark
    asked: float


class Settled:
    """Up to where that is so, from the beginning of a queue without recipients and levels. As the floors it is shared without a
    lock: what was lost of it is walked over once more."""

    __slots__ = ("_again_at", "_ask_at", "_believed", "_blocked", "_mark", "_wait", "era", "is_long", "over", "to")

    def __init__(self) -> None:
        #: Whether no message has been found yet where there could be none.
        self._believed = True
        #: How often all was forgotten.
        self.era = 0
        self.forget()

    def forget(self) -> None:
        """Nothing is known any more: the next look may go to another server."""
        self.era += 1
        #: No message is below this seq, and none will be.
        self.to = 0
        #: Below this one nobody can bring any more messages: a look from now on sees what there is.
        self.over = 0
        self._mark = Mark()
        self._ask_at = self._again_at = 0.0
        #: Seconds to the next question.
        self._wait = ASK_EVERY
        #: Whether walks take long enough.
        self.is_long = False
        #: Whether the first message there keeps all above it from being settled.
        self._blocked = False

    def question(self, floor: int) -> Question | None:
        """Whether somebody is to ask now who writes, and ``told`` the answer; None: not now."""
        now = monotonic()
        if not self.is_long or not self._believed or self._blocked or self.over >= floor or now < self._ask_at:
            return None
        self._ask_at = now + self._wait
        return Question(floor, self._mark, now)

    def told(self, question: Question, writers: Set[str] | None) -> None:
        """Who writes. None: the database does not tell."""
        mark = question.mark
        if mark is not self._mark:
            return  # somebody else was told meanwhile, and these have been asked for too soon
        if writers is None:
            self._ask_at = math.inf
            return
        if mark.is_over(writers):
            self.over = max(self.over, mark.floor)
            self._mark, self._wait = Mark(question.floor, writers), ASK_EVERY
        else:
            self._wait = min(2 * self._wait, ASK_SELDOM)
        now = monotonic()
        self._ask_at = now + max(self._wait, REST_OF_ASKING * (now - question.asked))

    def seen(self, looked: Range, peek: Peek, before: Before) -> None:
        """A look saw this behind the floor in this range."""
        if before.era != self.era:
            return
        if peek.present < before.to:
            self._believed = False
            self.forget()
            return
        if not looked.low <= self.to <= looked.high or not self._believed:
            return
        end = min(looked.high, peek.reached or looked.high) + 1
        self._blocked = peek.present < end and peek.present <= self.over
        self.to = max(self.to, min(end, peek.present, before.over))

    def lower(self, seq: int) -> None:
        """Here is one, whoever has said so."""
        self.to = min(self.to, seq)

    def walked(self, seconds: float) -> None:
        """A walk over all that is not settled took the server so long."""
        self.is_long = seconds > BRIEF

    def walked_over_settled(self, seconds: float) -> None:
        """A look at a part of what is settled took the server so long."""
        self._again_at = monotonic() + min(REST_OF_SETTLED * seconds, max(LONGEST_REST, REST * seconds))

    def all_was_walked_over(self, seconds: float) -> None:
        """Looks at all parts of it took so long together."""
        if seconds < BRIEF:
            self.to = 0  # they are as quickly walked over with all else

    @property
    def is_due(self) -> bool:
        """Whether what is settled is to be looked at."""
        return self.to > 0 and monotonic() >= self._again_at
