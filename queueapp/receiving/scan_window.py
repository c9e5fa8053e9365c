"""Going over a stretch of seqs in windows that are sized by the time they take."""

from __future__ import annotations

from datetime import timedelta

#: A rescan window should take about this long, beside the way to the server and back; it is halved above twice, doubled below
#: half of it.
WINDOW_TARGET = timedelta(milliseconds=10).total_seconds()
FIRST_WINDOW = 50_000
_SMALLEST_WINDOW = 1_000
#: A half of all seqs there are: somebody may insert one of the highest, and all others then lie behind the floor.
_LARGEST_WINDOW = 1 << 62
#: However slow its looks are a cycle takes so many at most: on a machine that is busy elsewhere a smaller window is no quicker, and
#: with windows of 1,000 a late commit behind a floor at a million waited for a thousand looks.
LOOKS_OF_A_CYCLE = 16
#: After a look behind a floor, or at what held nothing for this process, no more of it for so many times as long: a tenth of the time.
#: Under load there are a hundred looks a second, and behind a million messages leased to others each of them read 10 ms of
#: those: as much again as walking over them once.
REST = 9


class Walk:
    """One cycle after the other from zero to an end, which may grow meanwhile."""

    __slots__ = ("position", "span", "taken")

    def __init__(self) -> None:
        #: Where it has got to; None: the next cycle has not begun.
        self.position: int | None = None
        #: How many seqs the next window has.
        self.span = FIRST_WINDOW
        #: What the present cycle, or the last one, has taken the server, in seconds.
        self.taken = 0.0

    def window(self) -> tuple[int, int]:
        """The seqs of the next window, from and to (exclusive)."""
        start = self.position or 0
        return start, start + self.span

    def go_on(self, end: int, seconds: float, reached: int = 0) -> bool:
        """A window was looked at, up to the seq ``reached`` if not to its end, and took the server so long. True when that completed
        a cycle, which goes from zero to ``end``."""
        start, end_of_window = self.window()
        self.taken = seconds if self.position is None else self.taken + seconds
        if reached:
            # Many rows that nobody may take now. In a stretch without any the span has doubled until it spans them all.
            self.span = max(reached + 1 - start, _SMALLEST_WINDOW)
            self.position = reached + 1
        else:
            self.position = end_of_window
        self._resize(seconds, end)
        if self.position >= end:
            self.position = None
            return True
        return False

    def _resize(self, seconds: float, whole: int) -> None:
        """Make the next window as large as the time of the last one allows; a cycle goes over so many seqs."""
        if seconds < WINDOW_TARGET / 2:
            self.span = min(self.span * 2, _LARGEST_WINDOW)
        elif seconds > WINDOW_TARGET * 2:
            # (Of a span beyond the floor a half is no less to look at.)
            self.span = max(min(self.span, whole) // 2, _SMALLEST_WINDOW, whole // LOOKS_OF_A_CYCLE)
